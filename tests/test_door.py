"""The door: who may come in, by which name, how often, and what is turned away before any work is done for it."""
import ast
import asyncio
import contextlib
import gc
import inspect
import json
import logging
import re
import shutil
import socket
import sqlite3
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx2
import openai
import pytest
from conftest import ROOT, ScriptedModel, TestClient, chat, free_port, main, parse_sse, sdk, wait_until

CHAT, RESPONSES, COUNT = "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens"
A, B = "sk-marker-of-alice", "sk-marker-of-bob"
EVIL = "https://evil.example"


def key(name):
    return {"authorization": f"Bearer {name}"}


def error_of(answer):
    """Status and code of a refusal that is the whole OpenAI error object, with the request's id."""
    error = answer.json()["error"]
    assert (set(answer.json()), set(error)) == ({"error"}, {"message", "type", "param", "code"})
    assert error["message"] and answer.headers["x-request-id"]
    return answer.status_code, error["code"]


def filled(path):
    return re.sub(r"\{[^}]*\}", "x", path)


ROUTES = [(method, filled(route.path)) for route in main.router.routes for method in route.methods]


@pytest.fixture
def keyed(client):
    """A server with the keys A and B, over a model of one word."""
    return client(ScriptedModel("fine"), api_key=f"{A}, {B}")


def talk(address, request, seconds=30):
    """What a server sends back for these bytes, until it closes or has nothing more to say."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


# -- keys ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method,path", [
    *(route for route in ROUTES if route[1] != "/health"), ("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json"),
    ("GET", "/nowhere"), ("POST", "/health"), ("GET", "//health"), ("GET", "/health/"), ("GET", "/HEALTH"),
    ("GET", "/health/../v1/models"), ("GET", "/v1/models/"), ("GET", "/v1/%6dodels"), ("OPTIONS", CHAT)])
def test_every_route_but_health_asks_for_a_key(keyed, method, path):
    answer = keyed.request(method, path, json={} if method == "POST" else None)
    assert error_of(answer) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("line", [
    "GET //v1/models", "GET /v1/../v1/models", "GET /V1/models", "GET /%2e%2e/v1/models", "GET /health%2f../v1/models",
    "GET /v1/models?/health", "GET http://localhost/v1/models", "GET /health;/v1/models", "GET /v1/models#/health"])
@pytest.mark.parametrize("host", ["localhost", "a/?x=", "x#", "localhost/health?"])
def test_no_spelling_of_a_path_or_a_host_goes_around_the_key(live, line, host):
    request = f"{line} HTTP/1.1\r\nhost: {host}\r\nx-forwarded-host: localhost\r\nconnection: close\r\n\r\n"
    said = talk(live(ScriptedModel("a"), api_key=A), request.encode())
    assert said.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 "))  # 400: no HTTP at all
    assert b"max_model_len" not in said


def test_health_needs_no_key(keyed):
    assert keyed.get("/health").json() == {"status": "ok"}
    assert keyed.head("/health").status_code == 405


@pytest.mark.parametrize("headers", [
    key(A), key(B), {"authorization": f"bearer  {B} "}, {"x-api-key": A},
    {"authorization": "Basic eA==", "x-api-key": A}],
    ids=["first", "second", "any case", "x-api-key", "beside a proxy's password"])
def test_each_key_opens_in_each_of_its_places(keyed, headers):
    assert keyed.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", [
    {}, key(""), key("x"), key(A[:-1]), key(A + "x"), key(A.upper()), key(f"{A}, {B}"), {"authorization": A},
    {"authorization": f"Basic {A}"}, {"x-api-key": ""}, {"x-api-key": "é".encode()},
    {"authorization": "Bearer ключ".encode()}, {"authorization": b"Bearer \xff\xfe"}, {"cookie": f"api_key={A}"}],
                         ids=ascii)
def test_what_is_no_key_opens_nothing_and_breaks_nothing(keyed, headers):
    answer = keyed.get("/v1/models", headers=headers, params={"api_key": A})
    assert error_of(answer) == (401, "invalid_api_key")
    assert A not in answer.text and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_key_may_have_letters_of_any_alphabet(client):
    served = client(ScriptedModel("a"), api_key="ключ")
    assert served.get("/v1/models", headers={"authorization": "Bearer ключ".encode()}).status_code == 200


def test_the_official_client_knows_a_refusal_and_comes_in_with_a_key(live):
    base = live(ScriptedModel("fine"), api_key=A)
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        sdk(base).models.list()
    said = sdk(base).with_options(api_key=A).chat.completions.create(**chat())
    assert said.choices[0].message.content == "fine"


def test_keys_come_from_a_file_with_names_and_stand_beside_those_of_the_environment(client, tmp_path, caplog):
    lines = f"\ufeff# who may come in\nalice:{A}\n\n  {B}  \nwith:colons:{A}\n"  # with a BOM, as Windows writes it
    (tmp_path / "keys").write_text(lines, encoding="utf-8")
    served = client(ScriptedModel("fine"), api_key="sk-third", api_keys_file=tmp_path / "keys")
    for given, status in ((A, 200), (B, 200), ("sk-third", 200), (f"colons:{A}", 200), ("alice", 401)):
        assert served.get("/v1/models", headers=key(given)).status_code == status
    caplog.set_level(logging.INFO)
    served.post(CHAT, json=chat(), headers=key(A))
    assert re.search(r"begins \(json, request \w+, alice\)", caplog.text)


@pytest.mark.parametrize("content", [None, b"", b"# none\n\n", b"alice:\n", b"\xff\xfe\x00"], ids=ascii)
def test_a_file_without_a_key_stops_the_start(tmp_path, content):
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(SystemExit, match="API_KEYS_FILE"):
        main.read_keys(main.Settings(api_keys_file=tmp_path / "keys"))


@pytest.mark.parametrize("text", [" ", ",", " , ,"])
def test_a_setting_without_a_key_in_it_stops_the_start(text):
    with pytest.raises(SystemExit, match="API_KEY"):
        main.read_keys(main.Settings.from_env({"API_KEY": text}))


def test_keys_are_compared_in_constant_time_and_all_of_them():
    calls = [ast.unparse(n) for n in ast.walk(ast.parse(inspect.getsource(main.caller))) if isinstance(n, ast.Call)]
    assert "any([hmac.compare_digest(asked, owner) for owner in server.keys])" in calls


def test_a_key_is_in_no_log_no_file_no_answer_and_no_printed_settings(client, settings, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    served = client(ScriptedModel("fine"), api_key=A, log_level="DEBUG")
    answers = [served.post(CHAT, json=chat(store=True), headers=key(A)), served.get("/v1/models", headers=key(A + "x")),
               *(served.get(path, headers=key(A)) for path in ("/v1/sessions", "/ready", "/metrics"))]
    assert answers[0].status_code == 200
    said = caplog.text + repr(settings(api_key=A)) + "".join(a.text + str(a.headers) for a in answers)
    wait_until(lambda: (tmp_path / "sessions.db").exists())
    said += "".join(path.read_bytes().decode("latin-1") for path in tmp_path.glob("sessions.db*"))
    assert A not in said


# -- whose it is -----------------------------------------------------------------------------------------------
@pytest.fixture
def belongings(keyed):
    """What A has made: (a chat with a label, a response)."""
    answer = keyed.post(CHAT, json=chat(session_id="mine", store=True, stream=True), headers=key(A))
    assert answer.status_code == 200
    response = keyed.post(RESPONSES, json={"input": "hi", "session_id": "ours"}, headers=key(A)).json()
    return answer.headers["x-session-id"], response["id"]


PLACES = [
    ("GET", "/v1/sessions/{}"), ("GET", "/v1/sessions/{}/events"), ("POST", "/v1/cancel/{}"), ("GET", CHAT + "/{}"),
    ("GET", CHAT + "/{}/messages"), ("DELETE", CHAT + "/{}"), ("GET", RESPONSES + "/{}"),
    ("GET", RESPONSES + "/{}?stream=true"), ("POST", RESPONSES + "/{}/cancel"), ("GET", RESPONSES + "/{}/input_items"),
    ("DELETE", RESPONSES + "/{}")]


@pytest.mark.parametrize("method,path", PLACES)
def test_what_another_key_has_made_is_as_unknown_as_what_nobody_has_made(keyed, belongings, method, path):
    for ref in (*belongings, "mine", "ours"):
        foreign = keyed.request(method, path.format(ref), headers=key(B))
        unknown = keyed.request(method, path.format("nobody"), headers=key(B))
        assert error_of(foreign)[0] == 404
        assert foreign.json() == unknown.json()
    assert keyed.get(f"/v1/sessions/{belongings[0]}", headers=key(A)).json()["status"] == "completed"
    assert keyed.get(f"{RESPONSES}/{belongings[1]}", headers=key(A)).status_code == 200


@pytest.mark.parametrize("path,body", [
    (CHAT, chat(stream=True)), (CHAT, chat(stream=True, session_id="mine")),
    (RESPONSES, {"input": "hi", "stream": True})])
def test_another_keys_stream_cannot_be_resumed(keyed, belongings, path, body):
    for ref in ("mine", belongings[0], belongings[1]):
        if body.get("session_id") in (None, ref):
            answer = keyed.post(path, json=body, headers={**key(B), "last-event-id": f"{ref}:0"})
            assert error_of(answer) == (404, "session_not_found")


def test_another_keys_response_cannot_be_continued_or_referred_to(keyed, belongings):
    item = keyed.get(f"{RESPONSES}/{belongings[1]}/input_items", headers=key(A)).json()["data"][0]["id"]
    for path in (RESPONSES, COUNT):
        continued = {"input": "more", "previous_response_id": belongings[1]}
        referring = {"input": [{"type": "item_reference", "id": item}]}
        assert keyed.post(path, json=continued, headers=key(A)).status_code == 200
        assert keyed.post(path, json=referring, headers=key(A)).status_code == 200
        assert error_of(keyed.post(path, json=continued, headers=key(B))) == (404, "previous_response_not_found")
        assert error_of(keyed.post(path, json=referring, headers=key(B))) == (404, "item_not_found")


def test_sessions_are_listed_to_their_own_key(keyed, belongings):
    listed = {k: [s["id"] for s in keyed.get("/v1/sessions", headers=key(k)).json()["data"]] for k in (A, B)}
    assert listed == {A: [*reversed(belongings)], B: []}


def test_two_keys_may_use_the_same_label_each_for_its_own_session(live):
    model = ScriptedModel("one", "two", gated=True)
    with httpx2.Client(base_url=live(model, api_key=f"{A},{B}"), timeout=30) as http, contextlib.ExitStack() as stack:
        body = chat(stream=True, session_id="demo")
        streams = {k: stack.enter_context(http.stream("POST", CHAT, json=body, headers=key(k))) for k in (A, B)}
        assert http.post(CHAT, json=body, headers=key(A)).status_code == 409
        assert http.post("/v1/cancel/demo", headers=key(B)).json()["id"] == streams[B].headers["x-session-id"]
        model.gate.release(100)
        ends = {k: json.loads(parse_sse(s.read().decode())[-2]["data"])["choices"][0]["finish_reason"]
                for k, s in streams.items()}
    assert ends == {A: "stop", B: "cancelled"}


def test_sessions_belong_to_their_key_after_a_restart_too(settings):
    def serve():
        return TestClient(main.create_app(settings(api_key=f"{A},{B}"), load=lambda *_: ScriptedModel("fine")))

    with serve() as http:
        id = http.post(CHAT, json=chat(store=True), headers=key(A)).json()["id"]
    with serve() as http:
        for path in (f"/v1/sessions/{id}", f"{CHAT}/{id}"):
            assert [http.get(path, headers=key(k)).status_code for k in (A, B)] == [200, 404]


def test_what_was_made_without_a_key_is_nobodys_once_there_are_keys(settings):
    with TestClient(main.create_app(settings(), load=lambda *_: ScriptedModel("fine"))) as http:
        id = http.post(CHAT, json=chat()).json()["id"]
    with TestClient(main.create_app(settings(api_key=A), load=lambda *_: ScriptedModel("fine"))) as http:
        assert http.get(f"/v1/sessions/{id}", headers=key(A)).status_code == 404


class Remembering(ScriptedModel):
    """Notes whose prompts it has opened."""

    def __init__(self, *words):
        super().__init__(*words)
        self.owners = []

    def open(self, tokens, budget, prompt, owner):
        self.owners.append(owner)
        return super().open(tokens, budget, prompt, owner)


def test_what_was_computed_for_a_key_is_kept_under_a_name_of_its_own(client):
    model = Remembering("a")
    served = client(model, api_key=f"{A},{B}")
    for k in (A, B, A):
        served.post(CHAT, json=chat(), headers=key(k))
    first, second, third = model.owners
    assert first == third != second
    assert "" not in model.owners and A not in model.owners


def test_ids_cannot_be_guessed(keyed):
    ids = {keyed.post(CHAT, json=chat(), headers=key(A)).json()["id"] for _ in range(20)}
    assert len(ids) == 20 and all(re.fullmatch(r"chatcmpl-[0-9a-f]{32}", id) for id in ids)  # of `secrets`: 128 bits


# -- without keys ----------------------------------------------------------------------------------------------
def from_address(settings, address, **values):
    app = main.create_app(settings(**values), load=lambda *_: ScriptedModel("fine"))
    return TestClient(app, client=address)


@pytest.mark.parametrize("address", ["203.0.113.7", "192.168.1.5", "172.17.0.1", "2001:db8::1", "::ffff:10.0.0.1",
                                     "0.0.0.0", "::", "testclient", ""])
def test_without_keys_another_machine_is_told_why_it_is_not_served(settings, address):
    with from_address(settings, (address, 50_000)) as http:
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", CHAT), ("GET", "/nowhere")):
            answer = http.request(method, path, json=chat() if method == "POST" else None)
            assert error_of(answer) == (403, "local_only") and "API_KEY" in answer.text
        assert http.get("/health").status_code == 200
        assert http.app.state.server.model_status == "not_loaded"


def test_a_client_without_an_address_is_not_taken_for_a_local_one(settings):
    with from_address(settings, None) as http:
        assert error_of(http.get("/v1/models")) == (403, "local_only")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_without_keys_this_machine_is_served(settings, address):
    with from_address(settings, (address, 50_000)) as http:
        assert http.post(CHAT, json=chat()).status_code == 200


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
def test_what_a_proxy_brings_comes_from_another_machine(live, header):
    answer = httpx2.get(f"{live(ScriptedModel('a'))}/v1/models", headers={header: "127.0.0.1"})
    assert error_of(answer) == (403, "local_only")


def test_whoever_opens_the_server_to_everybody_is_told_so_at_the_start(settings, caplog):
    with from_address(settings, ("203.0.113.7", 50_000), allow_unauthenticated=True) as http:
        assert http.post(CHAT, json=chat(), headers={"x-forwarded-for": "203.0.113.8"}).status_code == 200
    assert any(r.levelno == logging.WARNING and "ALLOW_UNAUTHENTICATED" in r.getMessage() for r in caplog.records)


def test_a_key_is_asked_for_even_where_everybody_was_to_be_served(settings):
    with from_address(settings, ("127.0.0.1", 50_000), allow_unauthenticated=True, api_key=A) as http:
        assert error_of(http.get("/v1/models")) == (401, "invalid_api_key")


def test_with_keys_another_machine_is_served(settings):
    with from_address(settings, ("203.0.113.7", 50_000), api_key=A) as http:
        assert http.get("/v1/models", headers=key(A)).status_code == 200


# -- names -----------------------------------------------------------------------------------------------------
@pytest.fixture
def named(client):
    return client(ScriptedModel("fine"), allowed_hosts="models.example, Box")


@pytest.mark.parametrize("host", [
    "localhost", "LOCALHOST:3000", "127.0.0.1:3000", "192.168.1.5", "[::1]:3000", "[2001:db8::1]", "models.example",
    "Models.Example:443", "box"])
def test_a_name_that_was_given_to_the_server_and_any_address_are_taken(named, host):
    assert named.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", [
    "attacker.example", "localhost.attacker.example", "127.0.0.1.attacker.example", "a.models.example", "localhost:x",
    "a/?x=", "x#", "localhost@attacker.example", "attacker.example:80@localhost", "[::1", "::1", "", " ", "[v1.x]"])
def test_a_name_that_nobody_gave_to_the_server_is_refused(named, host):
    answer = named.get("/v1/models", headers={"host": host})
    assert error_of(answer) == (403, "host_not_allowed") and "ALLOWED_HOSTS" in answer.text


def test_a_name_is_asked_for_of_those_with_a_key_too(keyed):
    answer = keyed.get("/v1/models", headers={**key(A), "host": "attacker.example"})
    assert error_of(answer) == (403, "host_not_allowed")


# -- web pages -------------------------------------------------------------------------------------------------
PAGE = "https://chat.example"


@pytest.fixture
def paged(client):
    """A server that the pages of PAGE may use."""
    return client(ScriptedModel("fine"), cors_origins=f"{PAGE.title()}, app://desk")


WRITES = [route for route in ROUTES if route[0] not in ("GET", "HEAD")]


@pytest.mark.parametrize("method,path", WRITES)
@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost:5173", "http://localhost.evil.example", "", "://"])
def test_a_web_page_from_elsewhere_can_write_nothing(client, method, path, origin):
    served = client(ScriptedModel("fine"))
    answer = served.request(method, path, headers={"origin": origin}, json=chat() if method == "POST" else None)
    assert error_of(answer) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers
    assert served.get("/v1/sessions").json()["data"] == [] and served.app.state.server.model_status == "not_loaded"


def test_a_request_without_a_host_makes_no_page_one_from_here(live):
    request = f"POST {CHAT} HTTP/1.0\r\norigin: null\r\ncontent-type: application/json\r\n\r\n"
    assert talk(live(ScriptedModel("a")), request.encode()).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("origin", [PAGE, "app://desk", "http://localhost"])
def test_a_page_that_is_listed_or_from_here_can_write(paged, origin):
    assert paged.post(CHAT, json=chat(), headers={"origin": origin}).status_code == 200


def preflight(http, origin, **headers):
    asked = {"origin": origin, "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type,last-event-id,x-stainless-lang"}
    return http.options(CHAT, headers=asked | headers)


def test_a_preflight_needs_no_key_and_lets_the_listed_page_send_what_clients_send(client):
    served = client(ScriptedModel("fine"), cors_origins=PAGE, api_key=A)
    answer = preflight(served, PAGE)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    assert {"authorization", "last-event-id", "x-stainless-lang"} <= set(
        answer.headers["access-control-allow-headers"].split(","))
    assert {"GET", "POST", "DELETE"} <= set(answer.headers["access-control-allow-methods"].split(", "))
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("values", [{}, {"cors_origins": PAGE}, {"cors_origins": PAGE, "api_key": A}], ids=str)
def test_a_preflight_of_another_page_is_granted_nothing(client, values):
    answer = preflight(client(ScriptedModel("fine"), **values), EVIL)
    assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers


def test_no_page_is_let_into_the_private_network(paged):
    answer = preflight(paged, PAGE, **{"access-control-request-private-network": "true"})
    assert answer.status_code == 400 and "access-control-allow-private-network" not in answer.headers


@pytest.mark.parametrize("status,method,path,fields", [
    (200, "GET", "/v1/models", {}), (200, "POST", CHAT, {"json": chat(stream=True)}),
    (404, "GET", "/v1/sessions/x", {}), (404, "GET", "/nowhere", {}),
    (400, "POST", CHAT, {"json": {}}), (415, "POST", CHAT, {"content": b"x"}), (405, "DELETE", CHAT, {}),
    (413, "POST", "/v1/cancel/x", {"content": b" " * 2**20}), (401, "GET", "/v1/models", {}),
    (403, "GET", "/v1/models", {"host": "x.example"}), (500, "POST", CHAT, {"json": chat("crash")})])
def test_the_listed_page_can_read_every_answer_and_its_headers(client, status, method, path, fields):
    class Crashing(ScriptedModel):
        def prepare(self, chat):
            return super().prepare(chat) if chat.messages[-1].content != "crash" else 1 / 0

    served = client(Crashing("fine"), cors_origins=PAGE, api_key=A, max_body_mib=0.5)
    headers = {"origin": PAGE, **({} if status == 401 else key(A))}
    if "host" in fields:
        headers["host"] = fields.pop("host")
    answer = served.request(method, path, headers=headers, **fields)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
    exposed = set(answer.headers["access-control-expose-headers"].split(", "))
    assert {"x-session-id", "x-request-id", "x-ignored-fields", "retry-after", "x-ratelimit-limit-requests",
            "x-ratelimit-reset-tokens"} <= exposed


def test_no_page_can_read_anything_by_default(client):
    answer = client(ScriptedModel("fine")).get("/v1/models", headers={"origin": EVIL})
    assert not [name for name in answer.headers if name.startswith("access-control-allow")]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_what_a_page_can_send_without_asking_is_no_json_and_refused(paged, kind):
    answer = paged.post(CHAT, content=json.dumps(chat()), headers={"origin": PAGE, "content-type": kind})
    assert error_of(answer) == (415, "not_json")


# -- bounds before work ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("headers,query", [
    ([(f"x-{n}", "1") for n in range(100)], ""), ([("x-large", "a" * 70_000)], ""), ([], "?" + "a" * 40_000),
    ([("range", "bytes=" + "0-," * 16_000)], "")], ids=["many", "large", "query", "ranges"])
def test_headers_that_are_many_or_large_are_refused(live, headers, query):
    base, status = live(ScriptedModel("a")), None
    with contextlib.suppress(httpx2.TransportError):  # uvicorn closes on what comes in pieces and has no end
        status = httpx2.get(f"{base}/v1/models{query}", headers=headers).status_code
    assert status in (431, 400, None) and httpx2.get(f"{base}/health").status_code == 200


def test_the_headers_that_clients_send_are_taken(client):
    headers = {f"x-{n}": "a" * 200 for n in range(80)}
    assert client(ScriptedModel("a")).get("/v1/models", headers=headers).status_code == 200


def test_headers_that_came_at_once_are_counted_too(client):
    answer = client(ScriptedModel("a")).get("/v1/models", headers={"x-large": "a" * 70_000})
    assert error_of(answer) == (431, "headers_too_large") and answer.headers["connection"] == "close"


def is_left(connection, seconds=20):
    connection.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: "], ids=ascii)
def test_a_connection_that_does_not_bring_its_headers_is_closed(live, sent):
    host, port = live(ScriptedModel("a"), send_timeout_seconds=0.3).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(sent)
        assert is_left(slow)


def test_headers_that_come_a_byte_at_a_time_are_not_waited_for(live):
    host, port = live(ScriptedModel("a"), send_timeout_seconds=0.5).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow, pytest.raises(ConnectionError):
        for n in range(600):  # a minute
            slow.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: "[n:n + 1] or b"a")
            time.sleep(0.1)


def test_the_second_request_of_a_connection_has_to_bring_its_headers_too(live):
    host, port = live(ScriptedModel("a"), send_timeout_seconds=1).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert slow.recv(65536).startswith(b"HTTP/1.1 200 ")
        slow.sendall(b"GET /health HTTP/1.1\r\nhost: lo")  # from here on uvicorn's own clock stands still
        assert is_left(slow)


def test_a_connection_that_keeps_asking_is_kept(live):
    with httpx2.Client(base_url=live(ScriptedModel("a"), send_timeout_seconds=0.3), timeout=30) as http:
        places = set()
        for _ in range(12):
            places.add(http.get("/health").extensions["network_stream"].get_extra_info("client_addr"))
            time.sleep(0.1)
    assert len(places) == 1


def test_closed_connections_are_forgotten_before_their_clock_strikes(live):
    base = live(ScriptedModel("a"))
    for _ in range(20):
        httpx2.get(f"{base}/health")

    def left():
        gc.collect()
        return sum(type(thing).__name__ in ("H11Protocol", "HttpToolsProtocol") for thing in gc.get_objects()) < 3

    wait_until(left)


def test_what_has_just_been_answered_gets_a_whole_turn_of_the_clock():
    class Connection:
        """Its answer ends just before the second look."""

        looks, response_complete, left = 0, False, None

        def get_write_buffer_size(self):
            self.looks += 1
            self.response_complete = self.looks > 1
            return 0

        def is_closing(self):
            return False

        def abort(self):
            self.left = self.looks

    async def watched():
        connection = Connection()
        connection.cycle = connection.transport = connection
        config = SimpleNamespace(http_protocol_class=lambda: connection, http2=False)
        settings = SimpleNamespace(send_timeout_seconds=0.01)
        main.bound_waiting(config, SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(settings=settings))))
        config.http_protocol_class()
        while not connection.left:
            await asyncio.sleep(0.01)
        return connection.left

    assert asyncio.run(asyncio.wait_for(watched(), 20)) == 3


def test_an_answer_that_is_taken_slowly_is_not_cut(live):
    base = live(ScriptedModel("x" * 30_000_000), send_timeout_seconds=0.4)
    host, port = base.removeprefix("http://").split(":")
    body, taken = json.dumps(chat()), 0
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        slow.connect((host, int(port)))
        slow.sendall((f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                      f"content-length: {len(body)}\r\n\r\n{body}").encode())
        while taken < 30_000_000:
            piece = slow.recv(2**20)
            assert piece, f"cut after {taken} bytes"
            taken += len(piece)
            time.sleep(0.005)


def test_a_stream_is_not_taken_for_a_connection_that_waits(live):
    model = ScriptedModel("a", "b", gated=True)
    base = live(model, send_timeout_seconds=0.2, keepalive_seconds=0.05)
    with httpx2.stream("POST", f"{base}{CHAT}", json=chat(stream=True), timeout=30) as answer:
        time.sleep(1.2)  # six looks
        model.gate.release(10)
        assert b"[DONE]" in answer.read()


def test_a_body_that_crawls_is_left_when_its_time_is_up(live):
    base = live(ScriptedModel("a"), send_timeout_seconds=30, body_timeout_seconds=0.6)
    host, port = base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
                     + b"content-length: 9999\r\n\r\n")
        slow.settimeout(0.05)
        for _ in range(400):
            slow.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
                break
        else:
            raise AssertionError("never left")
    assert httpx2.get(f"{base}/health").status_code == 200


def test_many_connections_that_say_nothing_keep_nobody_out(live):
    base = live(ScriptedModel("a"), send_timeout_seconds=2)
    host, port = base.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(200)]
        assert httpx2.post(f"{base}{CHAT}", json=chat(), timeout=30).status_code == 200
        assert all(map(is_left, idle))


def test_a_body_of_two_lengths_is_refused_and_its_connection_closed(live):
    request = (f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 4\r\n"
               "transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    said = talk(live(ScriptedModel("a")), request.encode())
    assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("length", ["x", "-1", "1.5", "", " ", "9" * 30, "4, 4", "٣".encode()], ids=ascii)
def test_a_length_that_is_none_is_refused(client, length):
    answer = client(ScriptedModel("a")).post(CHAT, json=chat(), headers={"content-length": length})
    assert error_of(answer) == (400, "invalid_request") and answer.headers["connection"] == "close"


@pytest.mark.parametrize("body", [b"zz\r\n", b"4\r\n{}{}zz", b"-1\r\n"], ids=ascii)
def test_a_body_that_is_no_http_is_refused_once_and_is_no_crash(live, caplog, body):
    request = f"POST {CHAT} HTTP/1.1\r\nhost: x.example\r\ntransfer-encoding: chunked\r\n\r\n".encode() + body
    base = live(ScriptedModel("a"))
    said = talk(base, request)
    assert re.match(rb"HTTP/1\.1 4\d\d ", said) and said.count(b"HTTP/1.1 ") == 1
    assert httpx2.get(f"{base}/health").status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


SHAPES = {"lists": b"[" * 100_000, "objects": b'{"a":' * 100_000, "lists in messages": b'{"messages":' + b"[" * 100_000}


@pytest.mark.parametrize("content", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_json_nested_a_hundred_thousand_deep_is_refused_at_once(client, path, content):
    began = time.monotonic()
    answer = client(ScriptedModel("a")).post(path, content=content, headers={"content-type": "application/json"})
    assert error_of(answer) == (400, "invalid_json") and time.monotonic() - began < 10


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_json_of_a_million_keys_is_refused_before_it_is_parsed(client, path):
    content = b"{" + b",".join(b'"%d":0' % n for n in range(10**6)) + b"}"
    answer = client(ScriptedModel("a"), max_body_mib=32).post(
        path, content=content, headers={"content-type": "application/json"})
    assert error_of(answer) == (400, "body_too_complex") and answer.headers["connection"] == "close"


def test_a_prompt_that_is_code_is_not_taken_for_a_complex_body(client):
    code = "if (a[i] == {b: c}) { return d[e]; }\n" * 20_000
    assert client(ScriptedModel("a", context=10**6)).post(CHAT, json=chat(code)).status_code == 200


@pytest.mark.parametrize("path,body", [(CHAT, chat()), (RESPONSES, {"input": "hi"}), (COUNT, {"input": "hi"})],
                         ids=["chat", "responses", "count"])
@pytest.mark.parametrize("fields,param", [
    ({"chat_template": "{{ cycler.__init__.__globals__ }}"}, "chat_template"),
    *(({"chat_template_kwargs": {name: value}}, f"chat_template_kwargs.{name}") for name, value in {
        "chat_template": "x", "tokenize": True, "messages": [], "tools": [], "documents": [], "conversation": [],
        "add_generation_prompt": False, "return_dict": False, "x": 1}.items())], ids=lambda v: str(v)[:50])
def test_a_request_brings_no_template_and_sets_nothing_of_it_but_what_is_listed(client, path, body, fields, param):
    answer = client(ScriptedModel("a")).post(path, json=body | fields)
    assert error_of(answer)[0] == 400 and answer.json()["error"]["param"] == param


def test_the_source_has_no_pickle_no_eval_no_loose_template_and_no_guard_that_an_option_removes():
    tree = ast.parse(inspect.getsource(main))
    imported = {name.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)
                for name in n.names} | {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported.isdisjoint({"pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "jinja2"})
    calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert calls.isdisjoint({"eval", "exec", "compile", "torch.load", "yaml.load"})
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Assert)]


# -- how often -------------------------------------------------------------------------------------------------
def test_requests_beyond_a_minutes_are_told_when_to_come_back(client):
    served = client(ScriptedModel("a"), api_key=f"{A},{B}", rate_limit_requests=2)
    answers = [served.post(CHAT, json=chat(), headers=key(A)) for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == ["1", "0", "0"]
    assert {a.headers["x-ratelimit-limit-requests"] for a in answers} == {"2"}
    assert all(0 < float(a.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60 for a in answers)
    assert error_of(answers[2]) == (429, "rate_limit_exceeded")
    assert answers[2].json()["error"]["type"] == "rate_limit_error"
    assert 0 < int(answers[2].headers["retry-after"]) <= 30
    assert served.post(RESPONSES, json={"input": "hi"}, headers=key(B)).status_code == 200


def test_every_answer_says_what_is_left_and_reading_takes_nothing(client):
    served = client(ScriptedModel("a"), rate_limit_requests=5, rate_limit_tokens=1000)
    for path, status in (("/v1/models", 200), ("/nowhere", 404), ("/v1/sessions/x", 404), ("/ready", 200)):
        answer = served.get(path)
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (status, "5")
        assert answer.headers["x-ratelimit-remaining-tokens"] == "1000"
    assert not [name for name in served.get("/health").headers if name.startswith("x-ratelimit")]


def test_without_limits_nothing_is_said_of_them(client):
    answer = client(ScriptedModel("a")).post(CHAT, json=chat())
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize("asked,said", [(3, 50), (50, 3)], ids=["answers", "prompts"])
def test_tokens_are_counted_and_what_was_too_much_is_paid_off(client, asked, said):
    served = client(ScriptedModel(*["a"] * said), rate_limit_tokens=20)
    first = served.post(CHAT, json=chat("word " * asked, stream=True))
    assert first.status_code == 200 and b"[DONE]" in first.read()
    second = served.post(CHAT, json=chat())
    assert error_of(second) == (429, "rate_limit_exceeded")
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    assert 60 < int(second.headers["retry-after"]) <= 105  # 54 tokens of 20: a debt of 34, and one to begin with


def test_a_bucket_fills_within_a_minute_and_no_further(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(main.time, "monotonic", lambda: now[0])
    bucket = main.Bucket(6)
    assert bucket.take(8) == -2 and bucket.seconds_until(1) == 30
    now[0] = 30.0
    assert bucket.take() == 1
    now[0] = 1000.0
    assert bucket.take() == 6


def test_who_comes_back_for_the_rest_of_a_stream_is_never_sent_away(client):
    served = client(ScriptedModel("a"), rate_limit_requests=1)
    body = chat(stream=True, session_id="mine")
    served.post(CHAT, json=body).read()
    assert served.post(CHAT, json=chat()).status_code == 429
    assert served.post(CHAT, json=body, headers={"last-event-id": "mine:0"}).status_code == 200
    assert served.get("/v1/sessions/mine/events").status_code == 200
    assert served.post(COUNT, json={"input": "hi"}, headers={"last-event-id": "mine:0"}).status_code == 429


def test_a_key_has_so_many_generations_under_way_and_the_others_have_theirs(live):
    model = ScriptedModel("a", gated=True)
    base = live(model, api_key=f"{A},{B}", max_requests_per_key=1)
    with httpx2.Client(base_url=base, timeout=30) as http:
        with http.stream("POST", CHAT, json=chat(stream=True), headers=key(A)) as first:
            for path, body in ((CHAT, chat()), (RESPONSES, {"input": "hi", "background": True})):
                answer = http.post(path, json=body, headers=key(A))
                assert error_of(answer) == (429, "rate_limit_exceeded") and int(answer.headers["retry-after"]) > 0
            with http.stream("POST", CHAT, json=chat(stream=True), headers=key(B)) as other:
                assert other.status_code == 200
                model.gate.release(100)
                first.read()
        assert http.post(CHAT, json=chat(), headers=key(A)).status_code == 200


def test_what_a_key_no_longer_reads_makes_room_for_what_it_asks_for(live):
    model = ScriptedModel("a", gated=True)
    with httpx2.Client(base_url=live(model, max_requests_per_key=1), timeout=30) as http:
        with http.stream("POST", CHAT, json=chat(stream=True, session_id="left")):
            pass
        wait_until(lambda: http.get("/v1/sessions/left").json()["readers"] == 0)
        with http.stream("POST", CHAT, json=chat(stream=True)) as second:
            assert second.status_code == 200
            assert http.get("/v1/sessions/left").json()["status"] == "cancelled"
            model.gate.release(100)


# -- how long --------------------------------------------------------------------------------------------------
@pytest.fixture
def slow(live):
    """A server whose model never comes to an end within the time that a request has."""
    model = ScriptedModel("a", "b", gated=True)
    model.gate.release()
    with httpx2.Client(base_url=live(model, request_timeout_seconds=0.5), timeout=30) as http:
        yield http
        model.gate.release(100)


def test_an_answer_that_takes_too_long_is_a_504_that_no_sdk_repeats(slow):
    answer = slow.post(CHAT, json=chat())
    assert error_of(answer) == (504, "request_timeout") and answer.headers["x-should-retry"] == "false"
    assert slow.get("/ready").json()["running"] == 0


def test_a_stream_that_takes_too_long_ends_with_an_error_frame_and_says_never_stop(slow):
    frames = parse_sse(slow.post(CHAT, json=chat(stream=True, session_id="mine")).text)
    assert json.loads(frames[-2]["data"])["error"]["code"] == "request_timeout" and frames[-1]["data"] == "[DONE]"
    assert not any('"finish_reason": "stop"' in frame["data"] for frame in frames)
    assert slow.get("/v1/sessions/mine").json()["status"] == "failed"


@pytest.mark.parametrize("background", [False, True])
def test_a_response_that_takes_too_long_has_failed(slow, background):
    answer = slow.post(RESPONSES, json={"input": "hi", "background": background, "stream": not background})
    if not background:
        assert json.loads(parse_sse(answer.text)[-2]["data"])["type"] == "response.failed"
        return
    where = f"{RESPONSES}/{answer.json()['id']}"
    wait_until(lambda: slow.get(where).json()["status"] == "failed")
    assert "0.5 s" in slow.get(where).json()["error"]["message"]


def test_the_clock_of_an_answer_goes_with_it(client):
    served = client(ScriptedModel("fine"), request_timeout_seconds=3000)
    for _ in range(2):  # the load hides from the collector what was there before it
        assert served.post(CHAT, json=chat()).status_code == 200

    def left():
        gc.collect()
        return not any(isinstance(thing, main.Generation) for thing in gc.get_objects())

    wait_until(left)


# -- behind a proxy --------------------------------------------------------------------------------------------
@pytest.fixture
def proxied(live, tmp_path):
    """`proxied(model)` is the address of nginx, as README has it, before a server of that model with the key A."""
    with contextlib.ExitStack() as stack:

        def make(model):
            base, port = live(model, api_key=A, allowed_hosts="models.example.com", keepalive_seconds=0.2), free_port()
            readme = (ROOT / "README.md").read_text(encoding="utf-8")
            server = re.search(r"```nginx\n(.*?)```", readme, re.DOTALL)[1]
            for written, here in (("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"), ("http://127.0.0.1:3000", base),
                                  ("/etc/ssl/models.pem", f"{tmp_path}/cert.pem"),
                                  ("/etc/ssl/models.key", f"{tmp_path}/key.pem")):
                assert written in server
                server = server.replace(written, here)
            subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
                            "/CN=models.example.com", "-keyout", "key.pem", "-out", "cert.pem"], cwd=tmp_path,
                           check=True, capture_output=True)
            places = "".join(f"{what}_temp_path {tmp_path}/{what};\n" for what in (
                "client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
            (tmp_path / "nginx.conf").write_text(
                f"daemon off;\nmaster_process off;\npid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\nevents {{}}\n"
                f"http {{\naccess_log off;\n{places}{server}}}\n")
            nginx = subprocess.Popen(
                ["nginx", "-p", tmp_path, "-e", tmp_path / "error.log", "-c", tmp_path / "nginx.conf"])
            stack.callback(nginx.wait, 20)
            stack.callback(nginx.terminate)
            http = stack.enter_context(httpx2.Client(
                base_url=f"https://127.0.0.1:{port}", verify=False, timeout=30, headers={"host": "models.example.com"}))
            wait_until(lambda: answers(http))
            return http

        yield make


def answers(http):
    with contextlib.suppress(httpx2.TransportError):
        return http.get("/health").status_code == 200


needs_nginx = pytest.mark.skipif(not (shutil.which("nginx") and shutil.which("openssl")), reason="nginx is not here")


@needs_nginx
def test_frames_come_one_by_one_through_the_nginx_of_the_readme(proxied):
    model = ScriptedModel("one", "two", gated=True)
    http = proxied(model)
    with http.stream("POST", CHAT, json=chat(stream=True), headers=key(A)) as answer:
        pieces, seen = answer.iter_text(), ""
        for word in ("one", "two"):
            model.gate.release()  # and only then is it said
            while word not in seen:
                seen += next(pieces)
        model.gate.release()
        assert "[DONE]" in seen + "".join(pieces)


@needs_nginx
def test_keys_bodies_and_names_are_asked_for_behind_the_nginx_of_the_readme_too(proxied):
    http = proxied(ScriptedModel("fine"))
    assert error_of(http.get("/v1/models")) == (401, "invalid_api_key")
    large = http.post(CHAT, json=chat("word " * 500_000), headers=key(A))  # more than nginx takes by itself
    assert error_of(large) == (400, "context_length_exceeded")


@pytest.mark.parametrize("path", ["/v1/models", CHAT])
def test_a_websocket_is_not_let_in(live, path):
    request = (f"GET {path} HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
               "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n")
    assert b" 101 " not in talk(live(ScriptedModel("a"), api_key=A), request.encode()).partition(b"\r\n")[0]


def test_the_database_knows_an_owner_and_no_key(client, tmp_path):
    served = client(ScriptedModel("fine"), api_key=A)
    served.post(CHAT, json=chat(), headers=key(A))
    served.get("/v1/sessions", headers=key(A))  # answered when all is on disk
    with sqlite3.connect(tmp_path / "sessions.db") as database:
        owners = database.execute("SELECT owner FROM sessions").fetchall()
    assert owners == [(main.owner_of(A.encode()),)]


def test_ten_requests_at_once_take_ten_of_the_bucket(client):
    served = client(ScriptedModel("a"), rate_limit_requests=10)
    with ThreadPoolExecutor(12) as pool:
        statuses = list(pool.map(lambda _: served.post(CHAT, json=chat()).status_code, range(12)))
    assert sorted(statuses) == [200] * 10 + [429] * 2
