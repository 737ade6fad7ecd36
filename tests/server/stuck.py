"""The program over a model whose third pass never ends: `python -m tests.server.stuck FLAGS`."""

import sys

from pydantic_settings import CliApp

from server.loading import Loaded, LoadingProgress
from server.serve import serve
from server.settings import Settings
from tests.server.serving import GatedLoader

PASSES = 2


def load_stuck(settings: Settings, progress: LoadingProgress) -> Loaded:
    loader = GatedLoader()
    loaded = loader(settings, progress)
    loader.model.close()
    loader.model.allow(PASSES)
    return loaded


if __name__ == "__main__":
    sys.exit(serve(CliApp.run(Settings, cli_args=sys.argv[1:]), loader=load_stuck))
