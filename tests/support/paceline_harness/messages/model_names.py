"""Models whose small files name modules, templates that reach for them among these."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

_REACHING = (
    "{{% import '{module}' as a %}}",
    "{{% include '/etc/passwd' %}}",
    "{{{{ cycler.__init__.__globals__.os.system('touch {module}') }}}}",
    "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}",
    "{{{{ self.__init__.__globals__.__builtins__.__import__('{module}') }}}}",
    "{{{{ messages|map(attribute='__class__')|first }}}}",
    "{{{{ raise_exception.__globals__['__builtins__']['__import__']('{module}') }}}}",
    "{{{{ '{{0.__class__.__init__.__globals__}}'.format(messages) }}}}",
)


def changed_models(model: Path, into: Path, target: str) -> dict[str, Path]:
    """Copies of a model that name the function `target`, by what they try."""
    module, _, name = target.partition(":")
    dotted, remote = f"{module}.{name}", f"{module}/{name}"
    config: dict[str, dict[str, Any]] = {
        "names of code": {
            "auto_map": {"AutoConfig": dotted, "AutoModelForCausalLM": f"{module}--{dotted}"},
            "architectures": [dotted],
            "custom_generate": remote,
            "trust_remote_code": True,
            "_name_or_path": remote,
        },
        "attention": {
            "attn_implementation": remote,
            "_attn_implementation": remote,
            "_experts_implementation": remote,
        },
        "family": {"model_type": dotted},
        "activation": {"hidden_act": dotted},
        "quantization": {"quantization_config": {"quant_method": dotted}},
        "positions": {"rope_scaling": {"rope_type": dotted, "factor": 2.0}},
    }
    changes: dict[str, tuple[str, Any]] = {
        f"config.json: {what}": ("config.json", change) for what, change in config.items()
    }
    tokenizer: dict[str, Any] = {
        "tokenizer_class": dotted,
        "auto_map": {"AutoTokenizer": [dotted, dotted]},
        "processor_class": dotted,
        "extra_special_tokens": {"a": {"__type": dotted, "content": "x"}},
    }
    changes |= {
        f"tokenizer_config.json: {key}": ("tokenizer_config.json", {key: value})
        for key, value in tokenizer.items()
    }
    changes["generation_config.json"] = ("generation_config.json", {"custom_generate": remote})
    changes["tokenizer.json"] = ("tokenizer.json", {"pre_tokenizer": {"type": dotted}})
    changes |= {
        f"template {number}": ("chat_template.jinja", text.format(module=module))
        for number, text in enumerate(_REACHING)
    }
    found: dict[str, Path] = {}
    for number, (what, (file, change)) in enumerate(changes.items()):
        found[what] = Path(shutil.copytree(model, into / str(number)))
        path = found[what] / file
        if isinstance(change, dict):
            before = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(before | change))
        else:
            path.write_text(change)
        (found[what] / f"{module}.py").write_text("import strangers\n")
    return found
