"""The forced overwrite on the virtual device agrees with the byte arithmetic; holding ends it."""

from __future__ import annotations

import numpy as np
import pytest

from atom.benchmarks.status_overwrite import overwrite_trial
from atom.device.virtual import VirtualDevice
from atom.model_ops.status_overwrite import host_reads


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64", "float32"])
@pytest.mark.parametrize("verdict_dtype", ["int32", "int64"])
def test_the_device_reads_what_the_arithmetic_says(dtype: str, verdict_dtype: str) -> None:
    verdict = np.ones(32, dtype=verdict_dtype)
    written = np.array([16384], dtype=dtype)
    trial = overwrite_trial(VirtualDevice("MI355X"), verdict, written)
    assert trial.reused
    assert trial.read.tolist() == host_reads(verdict, written).tolist()


def test_holding_the_source_keeps_the_verdict() -> None:
    verdict = np.ones(32, dtype=np.int32)
    written = np.array([16384], dtype=np.int32)
    trial = overwrite_trial(VirtualDevice("MI355X"), verdict, written, hold=True)
    assert not trial.reused
    assert trial.read.tolist() == verdict.tolist()
