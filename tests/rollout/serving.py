"""`ulorl serve` with the stand-in for SGLang. python serving.py RUN_DIR MODEL NUMBER MAX_RESTARTS"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])  # not this folder, whose names would hide others

from ulorl_megatron.config.schema import Config  # noqa: E402
from ulorl_megatron.errors import UserError  # noqa: E402
from ulorl_megatron.rollout import server  # noqa: E402
from ulorl_megatron.rollout.serve import serve  # noqa: E402

FAKE = Path(__file__).parents[1] / "fake_server.py"

if __name__ == "__main__":
    run_dir, model, number, restarts = sys.argv[1:]
    server.command = lambda config, index, port, host: [sys.executable, str(FAKE), str(port), "0.05", "0"]
    config = Config()
    config.run.dir, config.model.path = run_dir, model
    config.servers.max_restarts = int(restarts)
    try:
        sys.exit(serve(config, int(number), "localhost"))
    except UserError as error:
        sys.exit(f"error: {error}")
