"""Started on every rank: launcher/run.py with this rank's own arguments. Usage: own_command.py COMMANDS.json."""

import json
import os
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "launcher" / "run.py"
sys.argv = [str(SCRIPT), *json.loads(Path(sys.argv[1]).read_text())[int(os.environ["RANK"])]]
runpy.run_path(str(SCRIPT), run_name="__main__")
