"""A process of lm-eval: `python harness.py RUNS RESULT`. It has the harness, and nothing of Stowage.

RUNS holds, as JSON, what `simple_evaluate` is called with, once for each run, and the folder of the tasks. RESULT gets,
for each run, what the harness found out about every document, by task.
"""

import json
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

asked = json.loads(Path(sys.argv[1]).read_text())
manager = TaskManager(include_path=asked["tasks"], include_defaults=False)
found = []
for run in asked["runs"]:
    samples = simple_evaluate(model="local-completions", task_manager=manager, log_samples=True, **run)["samples"]
    found.append({name: sorted(lines, key=lambda line: line["doc_id"]) for name, lines in samples.items()})
Path(sys.argv[2]).write_text(json.dumps(found, default=str))
