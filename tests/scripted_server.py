"""A real server in its own process over a scripted model: `WORDS` (how many), `SECONDS` (each), settings as usual."""
import os

import uvicorn
from conftest import ScriptedModel, main

if __name__ == "__main__":
    words = [f"w{n} " for n in range(int(os.environ.get("WORDS", "100")))]
    model = ScriptedModel(*words, seconds=float(os.environ.get("SECONDS", "0.01")))
    settings = main.Settings.from_env()
    uvicorn.run(main.create_app(settings, load=lambda *_: model), host=settings.host, port=settings.port)
