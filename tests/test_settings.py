"""Settings: types, bounds, empty values, faults at the start, secrets, and what happens when."""
import logging
import os
import subprocess
import sys

import pytest
from conftest import ROOT, ScriptedModel, main
from pydantic import ValidationError

RANGES = {  # name: (values at the edge of what is allowed, values beyond it)
    "port": (["0", "65535"], ["-1", "65536"]),
    "max_context_tokens": (["16"], ["15", "0", "-1"]),
    "max_tokens": (["1"], ["0", "-1"]),
    "max_output_tokens": (["1"], ["0", "-1"]),
    "responses_max_count": (["1"], ["0"]),
    "temperature": (["0", "2"], ["-0.01", "2.01"]),
    "max_concurrent_requests": (["1"], ["0"]),
    "max_queued_requests": (["0"], ["-1"]),
    **{name: (["1"], ["0", "-1"]) for name in ("max_requests_per_key", "rate_limit_requests", "rate_limit_tokens")},
    "max_batch_tokens": (["16"], ["15"]),
    "kv_cache_fraction": (["0.01", "1"], ["0", "1.01"]),
    "max_video_frames": (["1"], ["0"]),
    **{name: (["0"], ["-1"]) for name in ("max_images", "max_videos", "max_audios")},
    "session_buffer_frames": (["1"], ["0"]),
    "cancel_after_disconnect_seconds": (["0"], ["-0.1"]),
    "shutdown_grace_seconds": (["0"], ["-0.1"]),
    "resume_after_restart_seconds": (["0"], ["-0.1"]),
    **{name: (["0.001"], ["0", "-1"]) for name in (
        "model_load_wait_seconds", "kv_cache_gib", "step_timeout_seconds", "max_body_mib", "max_media_mib",
        "sessions_ttl_seconds", "responses_ttl_seconds",
        "responses_max_mib", "session_buffer_mib", "sessions_buffer_mib", "keepalive_seconds", "send_timeout_seconds",
        "max_image_mib", "max_audio_mib", "max_video_mib", "max_image_megapixels", "max_audio_seconds",
        "media_fetch_seconds", "request_timeout_seconds", "body_timeout_seconds")},
}
CHOICES = {
    "log_level": ["DEBUG", "INFO", "WARNING", "ERROR"], "torch_dtype": ["auto", "float32", "bfloat16", "float16"],
    "quantization": ["none", "int8", "int4", "bnb-4bit", "bnb-8bit"], "sse_ids": ["always", "session"],
}
SWITCHES = ["trust_remote_code", "allow_pickle", "allow_unauthenticated", "eager_load_model", "strict_model",
            "media_urls", "persist_sessions", "compile", "cuda_graphs"]
TEXTS = ["host", "model_repo_id", "models_dir", "hf_token", "device_map", "media_allow_hosts", "media_root",
         "sessions_db_path", "api_key", "api_keys_file", "allowed_hosts", "cors_origins"]


def read(name, value):
    return getattr(main.Settings.from_env({name.upper(): value}), name)


def python(code_or_file, cwd, **env):
    """Run Python in a folder of the test's own; only what is given here is set."""
    kept = {k: v for k, v in os.environ.items() if k.lower() not in main.Settings.model_fields}
    return subprocess.run([sys.executable, *code_or_file], cwd=cwd, capture_output=True, text=True, timeout=120,
                          env={**kept, "PYTHONPATH": str(ROOT), **env})


def test_every_setting_is_in_the_tables_of_this_test():
    assert {*RANGES, *CHOICES, *SWITCHES, *TEXTS} == set(main.Settings.model_fields)


@pytest.mark.parametrize("name,value", [(n, v) for n, (edge, _) in RANGES.items() for v in edge])
def test_a_number_at_the_edge_is_taken(name, value):
    assert read(name, value) == float(value)


@pytest.mark.parametrize("name,value", [
    *((n, v) for n, (_, beyond) in RANGES.items() for v in [*beyond, "many", "nan", "1,5"]),
    *((n, "1.5") for n in ("port", "max_tokens", "max_context_tokens", "session_buffer_frames")),
    *((n, v) for n in CHOICES for v in ("AUTO", "other")), *((n, v) for n in SWITCHES for v in ("2", "maybe"))])
def test_a_value_of_the_wrong_kind_or_beyond_the_bounds_is_a_fault_that_names_its_setting(name, value):
    with pytest.raises(ValidationError) as fault:
        read(name, value)
    assert [e["loc"][0] for e in fault.value.errors()] == [name]


@pytest.mark.parametrize("name,value", [(n, v) for n, values in CHOICES.items() for v in values])
def test_a_choice_is_taken_as_written(name, value):
    assert read(name, value) == value


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value,meaning", [("1", True), ("true", True), ("0", False), ("false", False)])
def test_a_switch_is_read_from_digits_and_words(name, value, meaning):
    assert read(name, value) is meaning


@pytest.mark.parametrize("name", main.Settings.model_fields)
def test_an_empty_value_means_none_where_none_is_allowed_and_the_default_elsewhere(name):
    none_allowed = name in ("hf_token", "temperature", "max_context_tokens", "media_root", "api_key", "api_keys_file")
    assert read(name, "") == (None if none_allowed else main.Settings.model_fields[name].default)


@pytest.mark.parametrize("name,taken,refused", [
    ("allowed_hosts", ["models", "a.example, b-c.example", "a,"], ["a b", "a:80", "*", "http://a"]),
    ("cors_origins", ["https://a.example", "http://localhost:5173, app://x"], ["*", "a.example", "https://a/b"])])
def test_a_list_is_taken_with_commas_and_nothing_else(name, taken, refused):
    assert [read(name, value) for value in taken] == taken
    for value in refused:
        with pytest.raises(ValidationError):
            read(name, value)


def test_settings_cannot_be_changed_after_they_were_read():
    with pytest.raises(ValidationError):
        main.Settings().port = 1


def test_names_are_read_in_capitals_and_strangers_are_left_alone():
    settings = main.Settings.from_env({"port": "1", "PATH": "/", "MAX_TOKENS": "7"})
    assert (settings.port, settings.max_tokens) == (3000, 7)


def test_every_setting_documents_itself():
    assert all(len(field.description) > 10 for field in main.Settings.model_fields.values())


def test_the_server_listens_on_this_machine_only_unless_told_otherwise():
    assert (main.Settings().host, main.Settings().port) == ("127.0.0.1", 3000)


@pytest.mark.parametrize("written,served", [
    ("org/name", "org/name"), ("org/name@v1.2", "org/name@v1.2"), ("demo", "demo"), ("gpt2", "gpt2"),
    ("{tmp}/my-model", "my-model"), ("{tmp}/my-model/", "my-model"), ("{tmp}/m.gguf", "m.gguf"),
    ("my-model", "my-model"), (".", "{here}")])
def test_the_served_id_is_the_setting_as_written_or_a_paths_last_part(written, served, tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    settings = main.Settings(model_repo_id=written.format(tmp=tmp_path))
    assert settings.served_id == served.format(here=tmp_path.name)


def test_a_gguf_in_a_folder_is_served_without_the_folders_path(tmp_path):
    served = main.Settings(model_repo_id=f"{tmp_path}:m.gguf").served_id
    assert served.endswith("m.gguf") and "/" not in served


def test_a_start_with_wrong_values_fails_and_names_every_one(tmp_path):
    done = python([str(ROOT / "main.py")], tmp_path, PORT="seven", TEMPERATURE="9", HF_TOKEN="hf_secret")
    assert done.returncode != 0
    assert "PORT" in done.stderr and "TEMPERATURE" in done.stderr
    assert "Traceback" not in done.stderr and "hf_secret" not in done.stderr + done.stdout


def test_uvicorns_start_with_a_wrong_value_fails_and_names_it(tmp_path):
    done = python(["-m", "uvicorn", "main:app", "--port", "0"], tmp_path, KEEPALIVE_SECONDS="0")
    assert done.returncode != 0 and "KEEPALIVE_SECONDS" in done.stderr


def test_a_wrong_value_in_the_env_file_stops_the_start(tmp_path):
    (tmp_path / ".env").write_text("MAX_TOKENS=none\n")
    done = python([str(ROOT / "main.py")], tmp_path)
    assert done.returncode != 0 and "MAX_TOKENS" in done.stderr


ENV_AT_START = """
import os, main
print(os.environ.get("MODEL_REPO_ID"))
from fastapi.testclient import TestClient
with TestClient(main.app, "http://localhost", client=("127.0.0.1", 1)) as client:
    print(client.get("/v1/models").json()["data"][0]["id"])
"""


@pytest.mark.parametrize("environment,after_import,served", [
    ({}, "None", "from/file"), ({"MODEL_REPO_ID": "from/environment"}, "from/environment", "from/environment")])
def test_the_env_file_is_read_at_start_and_the_environment_goes_before_it(environment, after_import, served, tmp_path):
    (tmp_path / ".env").write_text("MODEL_REPO_ID=from/file\nPERSIST_SESSIONS=0\n")
    done = python(["-c", ENV_AT_START], tmp_path, **environment)
    assert done.stdout.split() == [after_import, served], done.stderr


IMPORT_ALONE = """
import sys
seen = []
def hook(event, args):
    if event == "open" and isinstance(args[0], str) and not args[0].startswith(libraries):
        seen.append(args[0])
    elif event in ("sqlite3.connect", "subprocess.Popen", "os.mkdir") or event.startswith("socket."):
        seen.append(event)
libraries = (*filter(None, sys.path), sys.prefix, sys.base_prefix, "/usr", "/etc", "/proc", "/dev")
sys.addaudithook(hook)
import main
found = seen + sorted({"torch", "transformers", "tokenizers"} & set(sys.modules))
sys.exit(str(found) if found else 0)
"""


def test_importing_the_module_opens_no_file_or_socket_and_pulls_in_no_torch(tmp_path):
    (tmp_path / ".env").write_text("PORT=none\n")
    done = python(["-c", IMPORT_ALONE], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [".env"]


def test_the_token_is_in_no_printed_form_of_the_settings():
    settings = main.Settings.from_env({"HF_TOKEN": "hf_secret"})
    assert settings.hf_token.get_secret_value() == "hf_secret"
    assert "hf_secret" not in f"{settings!r} {settings} {settings.model_dump_json()}"


@pytest.mark.parametrize("written", ["hf_secret\n", " hf_secret\r", "hf_secret"], ids=ascii)
def test_what_a_copied_token_brings_along_is_left_out(written):
    assert main.Settings.from_env({"HF_TOKEN": written}).hf_token.get_secret_value() == "hf_secret"


@pytest.mark.parametrize("token", ["hf_secret\n\nhf_2", "hf_sécret", "hf_secret x", "hf_\x01secret"], ids=ascii)
def test_a_token_that_no_header_can_carry_stops_the_start_and_is_not_shown(token, tmp_path):
    done = python([str(ROOT / "main.py")], tmp_path, HF_TOKEN=token)
    assert done.returncode != 0 and "HF_TOKEN" in done.stderr
    assert not any(word in done.stderr + done.stdout for word in ("Traceback", "secret", "sécret"))


def test_neither_token_nor_prompt_nor_answer_is_logged(client, caplog):
    caplog.set_level(logging.DEBUG)
    served = client(ScriptedModel("the", "answer"), hf_token="hf_secret", log_level="DEBUG")
    body = {"messages": [{"role": "user", "content": "the-question"}], "session_id": "mine"}
    assert served.post("/v1/chat/completions", json=body).status_code == 200
    assert "started: model" in caplog.text
    assert not any(word in caplog.text for word in ("hf_secret", "the-question", "theanswer"))
