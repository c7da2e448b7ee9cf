"""Answers that must have a form: enforced on the demo model, whatever it would rather say, or refused."""
from __future__ import annotations

import json
import re

import openai
import pytest
from conftest import ROOT, TestClient, chat, main, sdk, text_of
from pydantic import BaseModel

URL = "/v1/chat/completions"
ASK = "Tell me about a person."


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    settings = main.Settings(
        model_repo_id="demo", models_dir=ROOT / "models", torch_dtype="float32", temperature=0.0, max_tokens=120,
        sessions_db_path=tmp_path_factory.mktemp("structured") / "s.db")
    with TestClient(main.create_app(settings)) as client:
        yield client


@pytest.fixture(scope="module")
def ai(http):
    return openai.OpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)


def ask(http, **fields):
    answer = http.post(URL, json=chat(ASK, **fields))
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def schema(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def by_schema(wanted, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted, **more}}}


SCHEMAS = [
    (schema(age={"type": "integer", "minimum": 0, "maximum": 150}), lambda v: 0 <= v["age"] <= 150),
    (schema(kind={"type": "string", "enum": ["né", "日本", '"q"']}), lambda v: v["kind"] in ("né", "日本", '"q"')),
    (schema(who={"$ref": "#/$defs/P"}) | {"$defs": {"P": schema(n={"type": "boolean"})}},
     lambda v: isinstance(v["who"]["n"], bool)),
    (schema(tags={"type": "array", "minItems": 2, "maxItems": 2, "items": {
        "anyOf": [{"type": "null"}, {"enum": ["a", "b"]}]}}), lambda v: len(v["tags"]) == 2),
    (schema(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"}),
     lambda v: re.fullmatch("[A-Z]{3}-[0-9]{2}", v["code"])),
    (schema(day={"type": "string", "format": "date"}), lambda v: re.fullmatch(r"\d{4}-\d\d-\d\d", v["day"])),
]


@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("wanted,holds", SCHEMAS, ids=lambda v: str(v)[:40] if isinstance(v, dict) else "")
def test_an_answer_has_the_form_of_its_schema_strict_or_not(http, wanted, holds, strict):
    value = json.loads(ask(http, **by_schema(wanted, strict=strict)))
    assert set(value) == set(wanted["properties"]) and holds(value)


def test_a_stream_says_what_the_json_says(http):
    fields = by_schema(SCHEMAS[0][0])
    streamed = http.post(URL, json=chat(ASK, stream=True, **fields)).text
    frames = [dict(line.split(": ", 1) for line in block.split("\n")) for block in streamed.strip().split("\n\n")]
    assert text_of(frames) == ask(http, **fields)


def test_the_sdk_parses_into_a_pydantic_model(ai):
    class City(BaseModel):
        name: str
        capital: bool

    answer = ai.chat.completions.parse(model="demo", messages=[{"role": "user", "content": "Name a city, briefly."}],
                                       response_format=City, max_tokens=100)
    assert isinstance(answer.choices[0].message.parsed, City)


def test_sampled_choices_all_have_the_form(http):
    answer = http.post(URL, json=chat(ASK, n=3, temperature=1.5, seed=5, **by_schema(SCHEMAS[1][0]))).json()
    assert all(SCHEMAS[1][1](json.loads(c["message"]["content"])) for c in answer["choices"])


def test_a_json_object_begins_and_goes_on_as_one(http):
    answer = http.post(URL, json=chat(ASK, response_format={"type": "json_object"}, max_tokens=40)).json()
    text = answer["choices"][0]["message"]["content"]
    assert text.startswith("{")
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("wanted,pattern", [
    ({"regex": "[0-9]{3}-[a-z]{2}"}, "[0-9]{3}-[a-z]{2}"),
    ({"choice": ["oui", 'né\n"x"', "日本"]}, 'oui|né\n"x"|日本'),
    ({"grammar": 'start: "yes" | "no"'}, "yes|no"), ({"json": {"enum": [7, 8]}}, "7|8"),
    ({"json": '{"enum": [7, 8]}'}, "7|8")], ids=str)
def test_the_extension_takes_expressions_choices_rules_and_schemas(http, wanted, pattern):
    assert re.fullmatch(pattern, ask(http, structured_outputs=wanted))


def test_an_answer_with_a_form_leaves_its_company_as_it_is(http):
    from concurrent.futures import ThreadPoolExecutor

    plain = chat("What is the capital of France?", max_tokens=8)
    alone = http.post(URL, json=plain).json()["choices"]
    with ThreadPoolExecutor(2) as pool:
        formed, together = pool.submit(ask, http, **by_schema(SCHEMAS[4][0])), pool.submit(http.post, URL, json=plain)
        assert together.result().json()["choices"] == alone and formed.result()


# -- what cannot be enforced -----------------------------------------------------------------------------------
@pytest.mark.parametrize("wanted,names", [
    (schema(a={"not": {}}), "not"), (schema(a={"type": "array", "uniqueItems": True}), "uniqueItems"),
    ({"$ref": "#/$defs/none"}, "$defs/none"), ({"$ref": "http://127.0.0.1:9/x"}, "127.0.0.1:9"),
    ({"type": "banana"}, "banana"),
    ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ""), ({"enum": [str(n) for n in range(9000)]}, ""),
    ({"description": "x" * 200_000}, "longer"), (schema(a={"type": "string", "format": "banana"}), "banana")],
    ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_refused_by_name_before_the_status_line(http, wanted, names, stream):
    answer = http.post(URL, json=chat(ASK, stream=stream, max_tokens=4, **by_schema(wanted)))
    if wanted.get("enum") and answer.status_code == 200:
        return  # large, and still within what can be followed
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "response_format")
    assert names in error["message"] and len(error["message"]) < 500


@pytest.mark.parametrize("fields,param", [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"), ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
     "response_format.json_schema.name"),
    ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "[1"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs")],
    ids=str)
def test_a_form_that_is_no_form_is_refused_by_name(http, fields, param):
    answer = http.post(URL, json=chat(ASK, **fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("wanted", [{"regex": "(x{1,9999}){9999}"}, {"regex": "((a+)+)+b"}, {"json": {
    "type": "string", "minLength": 10**9}}, {"json": {"type": "string", "pattern": "(x{1,9999}){9999}"}}], ids=str)
def test_a_hostile_form_harms_nobody(http, wanted):
    answer = http.post(URL, json=chat(ASK, max_tokens=12, structured_outputs=wanted))
    assert answer.status_code in (200, 400) or answer.json()["error"]["code"] == "grammar_failed"
    assert http.post(URL, json=chat("hi", max_tokens=2)).status_code == 200


def test_many_schemas_are_compiled_and_few_are_kept(http):
    model = http.app.state.server.model
    for n in range(main.MAX_GRAMMARS + 20):
        wanted = schema(**{f"p{n}": {"type": "null"}})
        model.prepare(main.Chat((main.Message("user", ASK),), grammar=main.json_grammar(wanted, "response_format")))
    assert model._compiled.cache_info().currsize == main.MAX_GRAMMARS


def test_the_text_format_changes_nothing(live):
    from conftest import ScriptedModel

    answer = sdk(live(ScriptedModel("free"))).chat.completions.create(**chat(), response_format={"type": "text"})
    assert answer.choices[0].message.content == "free"
