"""What `dtype: auto` in a job means."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import load_job, parse_job, resolve_job
from paceline.config.precision import Dtype, fast_dtype

JOB: dict[str, Any] = {
    "name": "a",
    "model": {"path": "models/tiny"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact"],
}


@pytest.mark.parametrize(
    ("text", "gpu", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n", False, "float32"),
        ("processor\t: 0\nflags\t\t: fpu avx512_bf16\n", False, "bfloat16"),
        ("processor\t: 0\nflags\t\t: fpu amx_bf16 amx_tile\n", False, "bfloat16"),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", False, "bfloat16"),
        ("processor\t: 0\nmodel name\t: bf16\n", False, "float32"),
        ("processor\t: 0\nflags\t\t: fpu avx2\n", True, "bfloat16"),
        (None, False, "float32"),
    ],
)
def test_bfloat16_where_there_are_units_for_it(
    text: str | None, gpu: bool, expected: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    if gpu:
        (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert fast_dtype(cpuinfo=tmp_path / "cpuinfo", gpus=tmp_path / "gpus") == expected


@pytest.mark.parametrize("installation", ["float32", "bfloat16"])
def test_a_job_gets_the_precision_of_the_installation(installation: Dtype) -> None:
    spec = resolve_job(JOB, dtype=installation)
    assert (spec.model.dtype, spec.trainer.dtype) == (installation, installation)
    own = resolve_job(JOB | {"model": {"path": "m", "dtype": "float16"}}, dtype=installation)
    assert (own.model.dtype, own.trainer.dtype) == ("float16", installation)
    # What was accepted does not change, wherever it is read.
    assert parse_job(spec.model_dump(mode="json")) == spec


def test_a_job_file_leaves_it_to_the_installation(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    assert load_job(path).model.dtype == "auto"
    # Without a gateway, all services take the same.
    assert parse_job(JOB).model.dtype == parse_job(JOB).trainer.dtype == "float32"
