"""Models from the hub: a fake one on loopback serves tiny real models to real servers, and refuses as the real one."""
import contextlib
import hashlib
import itertools
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
import tiny
from conftest import ROOT, Process, TestClient, chat, free_port, main, wait_until
from safetensors.torch import load_file, save_file

CHAT, PYTHON_MAIN = "/v1/chat/completions", (sys.executable, "main.py")
GREEDY = {"temperature": 0, "max_tokens": 12}
TOKEN, STRANGERS_TOKEN = "hf_OpensTheGate", "hf_OpensNothing"
PADDING = 12 * 2**20  # a download is counted in pieces of 10 MiB: a smaller file never shows half done
HELD_BYTES = 1000
REVISIONS = {"main": {"seed": 5, "context": 512}, "v1": {"seed": 6, "context": 256}}


class FakeHub(ThreadingHTTPServer):
    """Serves folders as the hub does, as far as its client and transformers ask. Tests change it while it runs."""

    daemon_threads = True

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), HubHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, Path]] = {}  # name -> revision -> folder
        self.gated: set[str] = set()  # names whose files only TOKEN opens
        self.authorizations: set[str | None] = set()
        self.weights_may_pass = threading.Event()  # while it is clear, weight files stop before their last bytes
        self.weights_may_pass.set()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.weights_may_pass.set()
        self.shutdown()
        self.server_close()


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/")
        parts = path.removeprefix("api/models/").split("/")
        repo, what, revision = "/".join(parts[:2]), *[*parts[2:4], "", ""][:2]
        file, given = "/".join(parts[4:]), self.headers.get("authorization")
        self.server.authorizations.add(given)
        if given not in (None, f"Bearer {TOKEN}"):
            return self.send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if repo not in self.server.repos:
            return self.send(404 if given else 401, {"X-Error-Code": "RepoNotFound"})
        folders = self.server.repos[repo]
        commits = {commit_of(repo, name): folder for name, folder in folders.items()}
        commit = revision if revision in commits else commit_of(repo, revision or "main")
        if what == "resolve" and repo in self.server.gated and not given:
            return self.send(401, {"X-Error-Code": "GatedRepo"})
        if commit not in commits:
            return self.send(404, {"X-Error-Code": "RevisionNotFound"})
        files = {f.relative_to(commits[commit]).as_posix(): f.read_bytes()
                 for f in commits[commit].rglob("*") if f.is_file()}
        if what in ("", "revision"):
            return self.send_json({"id": repo, "sha": commit, "tags": [], "private": False,
                                   "siblings": [{"rfilename": name} for name in files]})
        if what == "tree" and not file:
            return self.send_json([{"type": "file", "path": name, "size": len(content), "oid": sha1(content)}
                                   for name, content in files.items()])
        if file not in files:
            return self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        self.send(200, {"X-Repo-Commit": commit, "ETag": f'"{sha1(files[file])}"'}, files[file],
                  HELD_BYTES if file.endswith(".safetensors") else 0)

    do_HEAD = do_GET

    def send_json(self, value):
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def send(self, status, headers, body=b"", held=0):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):  # the server under test has gone
                self.wfile.write(body[:len(body) - held])
                if held:
                    self.server.weights_may_pass.wait()
                    self.wfile.write(body[len(body) - held:])

    def log_message(self, *_):
        pass


def sha1(content):
    return hashlib.sha1(content).hexdigest()


def commit_of(repo, revision):
    return sha1(f"{repo}@{revision}".encode())


def save_model(folder, seed=5, context=512, **options):
    """A tiny real model as a repository holds it; another seed has other weights."""
    network = tiny.network("llama")
    with tiny.torch.random.fork_rng(devices=[]), tiny.torch.no_grad():
        tiny.torch.manual_seed(seed)
        for weight in network.parameters():
            weight.normal_(std=0.1)
    network.config.max_position_embeddings = context
    network.save_pretrained(folder, **options)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The revisions of `org/tiny`."""
    return {name: save_model(tmp_path_factory.mktemp(name), **what) for name, what in REVISIONS.items()}


@pytest.fixture(scope="module")
def said(folders):
    """What each revision says, loaded from disk."""
    answers = {}
    for revision, folder in folders.items():
        settings = main.Settings(
            model_repo_id=str(folder), torch_dtype="float32", device_map="cpu", persist_sessions=False)
        with TestClient(main.create_app(settings)) as http:
            answers[revision] = text_in(http.post(CHAT, json=chat(**GREEDY)))
    assert len(set(answers.values())) == len(answers)
    return answers


@pytest.fixture
def hub(folders):
    """A hub that has `org/tiny`."""
    with contextlib.closing(FakeHub()) as hub:
        hub.repos["org/tiny"] = folders
        yield hub


def environment(url, home, name="org/tiny", **env):
    """What makes a server load that model from the hub at `url`, or from the cache in `home`."""
    return {"MODEL_REPO_ID": name, "HF_ENDPOINT": url, "HF_HOME": home, "HF_HUB_DISABLE_XET": 1, "HF_HUB_OFFLINE": 0,
            "HF_TOKEN": "", "NO_PROXY": "127.0.0.1", "DEVICE_MAP": "cpu", "TORCH_DTYPE": "float32", **env}


@pytest.fixture
def serve(start, hub, tmp_path):
    """`serve(name, **environment)` is a real server of that model from the hub; all of a test share one cache."""

    def make(*name, command=PYTHON_MAIN, **env):
        return start(command, **environment(hub.url, tmp_path / "hf", *name, **env))

    return make


@pytest.fixture(scope="module", autouse=True)
def without_hub(tmp_path_factory):
    """A server that finds nobody where its hub should be, and the port where it looks. It takes most of a minute to
    give up, so it begins with the first test and is asked by the last."""
    folder, port = tmp_path_factory.mktemp("without_hub"), free_port()
    env = environment(f"http://127.0.0.1:{port}", folder)
    server = Process(PYTHON_MAIN, {**env, "EAGER_LOAD_MODEL": 1, "PERSIST_SESSIONS": 0}, folder / "log")
    yield server, port
    server.kill()


def ask(server):
    return httpx2.post(server.base + CHAT, json=chat(**GREEDY), timeout=250)


def text_in(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def refusal(response):
    """The message of a load that failed."""
    assert (response.status_code, response.json()["error"]["code"]) == (503, "model_load_failed"), response.text
    return response.json()["error"]["message"]


def ready(server):
    return httpx2.get(f"{server.base}/ready").json()


def log_of(server):
    return Path(server.log).read_text()


# -- loading ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, revision", [
    ("org/tiny", "main"), ("org/tiny@v1", "v1"), (f"org/tiny@{commit_of('org/tiny', 'v1')}", "v1")],
    ids=["the default", "a tag", "a commit"])
def test_a_hub_id_answers_with_the_weights_of_its_revision(serve, said, name, revision):
    server = serve(name)

    assert text_in(ask(server)) == said[revision]
    assert ready(server)["context_length"] == REVISIONS[revision]["context"]


def test_a_download_that_is_under_way_is_told_in_bytes(serve, hub, tmp_path):
    folder = save_model(tmp_path / "large")
    weights = folder / "model.safetensors"
    save_file(load_file(weights), weights, {"format": "pt", "padding": " " * PADDING})
    hub.repos["org/large"] = {"main": folder}
    hub.weights_may_pass.clear()
    server = serve("org/large", EAGER_LOAD_MODEL=1)

    def half_done():
        told = ready(server)
        return told["progress"]["stage"] == "download" and told["progress"]["done"] > PADDING / 2 and told

    told = wait_until(half_done, 100)

    assert told["status"] == "loading"
    assert told["progress"]["unit"] == "bytes"
    assert told["progress"]["done"] < told["progress"]["total"] == weights.stat().st_size
    hub.weights_may_pass.set()
    wait_until(lambda: ready(server)["status"] == "ready", 100)


TELLING_SERVER = (sys.executable, "-c", """
import dataclasses, json, os, sys
import uvicorn
sys.path.insert(0, sys.argv[1])
import main

def load(settings, report):
    def tell(progress):
        with open(os.environ["TOLD"], "a") as told:
            print(json.dumps(dataclasses.asdict(progress)), file=told)
        report(progress)
    return main.load_model(settings, tell)

settings = main.Settings.from_env()
uvicorn.run(main.create_app(settings, load=load), host=settings.host, port=settings.port)
""", str(ROOT))


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "100KB"}], ids=["one file", "several files"])
def test_a_load_tells_the_whole_download_and_then_every_weight(serve, hub, tmp_path, shards):
    folder = save_model(tmp_path / "model", **shards)
    files = list(folder.glob("*.safetensors"))
    assert (len(files) > 1) == bool(shards)
    hub.repos["org/tiny"] = {"main": folder}
    server = serve(command=TELLING_SERVER, TOLD=tmp_path / "told")

    text_in(ask(server))

    told = map(json.loads, (tmp_path / "told").read_text().splitlines())
    counted = [step for step in told if step["stage"] in ("download", "weights") and step["done"]]
    stages = [stage for stage, _ in itertools.groupby(counted, lambda step: step["stage"])]
    assert stages == ["download", "weights"]
    most = {step["stage"]: step for step in sorted(counted, key=lambda step: step["done"])}
    downloaded, tensors = sum(f.stat().st_size for f in files), sum(len(load_file(f)) for f in files)
    assert most["download"] == {"stage": "download", "done": downloaded, "total": downloaded, "unit": "bytes"}
    assert most["weights"] == {"stage": "weights", "done": tensors, "total": tensors, "unit": "tensors"}


def test_the_terminal_shows_bars_of_the_download_and_of_the_weights(serve):
    server = serve()

    text_in(ask(server))

    bars = [line for line in log_of(server).replace("\r", "\n").splitlines() if "100%|" in line]
    assert any("model.safetensors" in bar for bar in bars)
    assert any("Loading weights" in bar for bar in bars)


def test_a_model_in_the_cache_loads_without_the_hub(serve, hub, said):
    first = serve()
    text_in(ask(first))
    first.kill()
    hub.close()

    assert text_in(ask(serve(HF_HUB_OFFLINE=1))) == said["main"]


# -- faults ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, token", [
    ("org/unknown", ""), ("org/unknown", TOKEN), ("org/tiny@unknown", ""), ("org/tiny/unknown", "")],
    ids=["repository", "repository, asked with a token", "revision", "no id at all"])
def test_a_wrong_name_is_called_one(serve, name, token):
    told = refusal(ask(serve(name, HF_TOKEN=token)))

    assert name in told and "no such model or revision" in told and "MODEL_REPO_ID" in told


@pytest.mark.parametrize("name", ["org/Tiny-2401", "org/gated-delta-net", "org/connected"])
def test_a_name_that_sounds_like_a_fault_is_not_taken_for_one(serve, hub, folders, name):
    hub.repos[name] = folders

    assert "no such model or revision" in refusal(ask(serve(f"{name}@unknown")))


@pytest.mark.parametrize("token", ["", STRANGERS_TOKEN], ids=["without one", "with one that the hub does not know"])
def test_a_gated_model_asks_for_a_token(serve, hub, token):
    hub.gated.add("org/tiny")

    told = refusal(ask(serve(HF_TOKEN=token)))

    assert "org/tiny" in told and "gated" in told and "HF_TOKEN" in told


def test_a_gated_model_loads_with_the_right_token(serve, hub, said):
    hub.gated.add("org/tiny")

    assert text_in(ask(serve(HF_TOKEN=TOKEN))) == said["main"]


@pytest.mark.parametrize("token, status", [(TOKEN, 200), (STRANGERS_TOKEN, 503)], ids=["loaded", "refused"])
def test_the_token_is_in_no_log_and_no_answer(serve, hub, token, status):
    hub.gated.add("org/tiny")
    server = serve(HF_TOKEN=token, LOG_LEVEL="DEBUG")

    answers = [ask(server), *(httpx2.get(server.base + path) for path in ("/ready", "/v1/models", "/v1/sessions"))]

    assert answers[0].status_code == status
    assert f"Bearer {token}" in hub.authorizations
    assert not any(token in said for said in (log_of(server), *(a.text + str(a.headers) for a in answers)))


def test_the_next_request_loads_a_model_that_has_appeared(serve, hub, folders, said):
    server = serve("org/later")
    refusal(ask(server))

    hub.repos["org/later"] = folders

    assert text_in(ask(server)) == said["main"]


# -- code that a repository ships ------------------------------------------------------------------------------
LEAVES_A_MARK = "import os, pathlib\npathlib.Path(os.environ['MARKER']).touch()\n"
OWN_CONFIG = LEAVES_A_MARK + "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig): model_type = 'own'\n"
OWN_MODEL = LEAVES_A_MARK + (
    "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
    "class OwnForCausalLM(LlamaForCausalLM): config_class = OwnConfig\n")


@pytest.fixture
def own_code(serve, hub, tmp_path):
    """`own_code(trusted, name)` is a server of a model that ships code, and the file that the code makes."""
    folder, marker = save_model(tmp_path / "model"), tmp_path / "marker"
    (folder / "configuration_own.py").write_text(OWN_CONFIG)
    (folder / "modeling_own.py").write_text(OWN_MODEL)
    config = folder / "config.json"
    config.write_text(json.dumps({
        **json.loads(config.read_text()), "model_type": "own", "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig",
                     "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}))

    def make(trusted, name="org/own"):
        hub.repos[name] = {"main": folder}
        return serve(name, TRUST_REMOTE_CODE=trusted, MARKER=marker), marker

    return make


def test_a_models_own_code_runs_where_it_is_trusted(own_code, said):
    server, marker = own_code(trusted=1)

    assert text_in(ask(server)) == said["main"]
    assert marker.exists()


@pytest.mark.parametrize("name", ["org/own", "org/Own-2403"])
def test_a_models_own_code_never_runs_where_it_is_not_trusted(own_code, name):
    server, marker = own_code(trusted=0, name=name)

    told = refusal(ask(server))

    assert name in told and "TRUST_REMOTE_CODE" in told
    assert not marker.exists()


def test_a_models_own_way_to_generate_never_runs_where_it_is_not_trusted(serve, hub, tmp_path, said):
    folder, marker = save_model(tmp_path / "model"), tmp_path / "marker"
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(LEAVES_A_MARK + "def generate(*_, **__): pass\n")
    hub.repos["org/own"] = {"main": folder}

    server = serve("org/own", TRUST_REMOTE_CODE=0, MARKER=marker)

    assert text_in(ask(server)) == said["main"]
    assert not marker.exists()


# -- what takes long, and was begun with the first test --------------------------------------------------------
def test_an_unreachable_hub_is_named_as_the_cause_and_tried_again_at_the_next_request(without_hub, folders, said):
    server, port = without_hub
    wait_until(lambda: ready(server)["status"] != "loading", 200)
    failed = ready(server)

    with contextlib.closing(FakeHub(port)) as hub:
        hub.repos["org/tiny"] = folders
        loaded = ask(server)

    assert (failed["status"], failed["error"]["code"]) == ("failed", "model_load_failed")
    assert "org/tiny" in failed["error"]["message"] and "the hub cannot be reached" in failed["error"]["message"]
    assert text_in(loaded) == said["main"]
