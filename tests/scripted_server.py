"""A real server in its own process over a scripted model: `WORDS` (how many), `WORD_LENGTH` (at least), `SECONDS`
(each), `LOSE_AT` (the word at which its device fails), `DIE_AT` (the word at which an answer of the seed 13 ends the
process), `CLOCK` (a file that says by how many seconds the system's clock is wrong), settings as usual."""
import os
import time
from pathlib import Path

if "CLOCK" in os.environ:
    right, clock = time.time, Path(os.environ["CLOCK"])
    time.time = lambda: right() + float(clock.read_text() or 0)

import uvicorn
from conftest import ScriptedModel, main


class DeadlyModel(ScriptedModel):
    def sample(self, logits, draws):
        if any(draw.sampling.seed == 13 and str(draw.n) == os.environ.get("DIE_AT") for draw in draws):
            os._exit(1)
        return super().sample(logits, draws)


if __name__ == "__main__":
    length = int(os.environ.get("WORD_LENGTH", "0"))
    words = [f"w{n} ".ljust(length) for n in range(int(os.environ.get("WORDS", "100")))]
    lose_at = int(os.environ["LOSE_AT"]) if "LOSE_AT" in os.environ else None
    model = DeadlyModel(*words, seconds=float(os.environ.get("SECONDS", "0.01")), fail_at=lose_at,
                        fault=(503, "device_lost"))
    settings = main.Settings.from_env()
    uvicorn.run(main.create_app(settings, load=lambda *_: model), host=settings.host, port=settings.port)
