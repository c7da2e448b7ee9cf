"""A real server in a process over a tiny real model in float32, or with `REAL` the one in the settings. `SECONDS`: what
a step without a prompt takes at least; `SEED`: of its weights; `ROOM`: tokens in its cache. Settings are as usual."""
import os
import time

import tiny
import torch
import uvicorn
from conftest import main

tiny.CONTEXT = 4096


def load(settings, report):
    if "REAL" in os.environ:
        model = main.load_model(settings, report)
    else:
        tiny.FAMILIES["llama"]["seed"] = int(os.environ.get("SEED", "5"))
        model = tiny.model("llama", room=int(os.environ.get("ROOM", "0")) or None)
    forward, seconds = model.forward, float(os.environ.get("SECONDS", "0"))

    def slow(work):
        time.sleep(seconds if all(len(item.tokens) == 1 for item in work) else 0)
        return forward(work)

    model.forward = slow
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    settings = main.Settings.from_env()
    uvicorn.run(main.create_app(settings, load=load), host=settings.host, port=settings.port)
