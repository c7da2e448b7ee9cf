"""The benchmark works: a tiny round of it, with a peer that does not start. Nothing here says how fast anything is."""
import contextlib
import json
import os
import subprocess
import sys

import bench
import h11
import loads
import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder that a quick run writes into."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "tests/bench.py", "--quick", "--peers", "--variants", "NO_SUCH=1",
               "--peer", f'broken="{sys.executable}" -c "print(\'I am broken\')"', "--out", folder]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


def rows(folder, server):
    """The cells of the tables' rows for that server, without its name and the number of clients."""
    table = (folder / "bench.md").read_text(encoding="utf-8").split("## To reach")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [cells[cells.index(server) + 1:] for cells in lines if server in cells]


def test_a_quick_run_measures_this_server_through_and_through(written):
    figures = json.loads((written / "bench.json").read_text(encoding="utf-8"))["medians"]
    cells = [cell for row in rows(written, bench.OURS) for cell in row]

    assert len(rows(written, bench.OURS)) == len(bench.QUICK.clients) + 2
    assert "-" not in cells
    assert all(value > 0 for name, value in figures[bench.OURS].items() if name != "reused")
    for name in (bench.PATH, bench.KEPT, bench.PACED):
        assert figures[name]["path"] > 0 and figures[name]["health"] > 0


def test_what_does_not_start_is_a_dash_and_a_sentence(written):
    notes = json.loads((written / "bench.json").read_text(encoding="utf-8"))["notes"]

    assert "broken: did not start: I am broken." in notes
    assert f"{bench.OURS}, NO_SUCH=1: this version has no setting NO_SUCH." in notes
    assert {cell for row in rows(written, "broken") for cell in row} == {"-"}


@pytest.mark.parametrize("end, broken", [(b"0\r\n\r\n", False), (b"", True), (b"5\r\nda", True)])
def test_a_stream_that_breaks_off_is_no_answer(end, broken):
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    event = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'
    came = [b"", head, b"%x\r\n%s\r\n" % (len(event), event), *filter(None, [end]), b""]
    answer = loads.Answer([*enumerate(came)])
    with pytest.raises(h11.RemoteProtocolError) if broken else contextlib.nullcontext():
        assert answer.text == "hi" and answer.first == 2000


def test_medians_are_those_of_the_rounds():
    rounds = {"a": {"x": [5.0, 1.0, 3.0], "y": [4.0, 2.0]}, "b": {"x": [7.0], "z": []}}

    assert bench.medians(rounds) == {"a": {"x": 3.0, "y": 3.0}, "b": {"x": 7.0}}


def test_what_was_to_be_reached_is_divided_the_right_way():
    middle = {bench.OURS: {"8 total": 100.0, "turn 2": 50.0, "16 memory": 120.0}, bench.PATH: {"path": 12000.0},
              bench.SERVE: {"8 total": 20.0, "turn 2": 500.0}, bench.BATCHING: {"8 total": 80.0, "16 memory": 100.0}}
    seen = {tuple(row[:3]): (row[4][0], row[5]) for row in bench.goals(middle)}

    assert seen["8 clients, tokens/s", bench.OURS, bench.SERVE] == (5.0, "yes")
    assert seen["8 clients, tokens/s", bench.OURS, bench.BATCHING] == (1.25, "no")
    assert seen["8 clients, tokens/s", bench.COMPILED, bench.BATCHING] == (None, "-")
    assert seen["second turn, sooner than the other's", bench.SERVE, bench.OURS] == (10.0, "yes")
    assert seen["peak memory, 16 clients", bench.OURS, bench.BATCHING] == (1.2, "no")
    assert seen["own path, tokens/s", bench.PATH, "-"] == (12000.0, "yes")
