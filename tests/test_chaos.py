"""Under load and fire. `LIVES=60` has more servers die in the storm, `STORM_SEED=7` draws another one."""
import os
import sys

import pytest
from chaos import storm

LIVES = int(os.environ.get("LIVES", "4"))
SEED = int(os.environ.get("STORM_SEED", "1"))


@pytest.mark.skipif(sys.platform == "win32", reason="it counts files and sends signals")
@pytest.mark.timeout(400 + 60 * LIVES)
def test_a_storm_on_servers_that_die_leaves_every_answer_whole_and_nothing_behind(tmp_path):
    seen, faults = storm(tmp_path, SEED, LIVES)

    assert faults == [], "\n".join(faults)
    for what in ("cut", "resumed", "connections lost to a server's end", "asked to cancel: cancelled", "half requests",
                 "rubbish", "clients: deaf", "clients: twin", "answers that were ended"):
        assert seen[what], what
    assert seen["sessions"] > 100 and seen["answers that are whole"] > 50
