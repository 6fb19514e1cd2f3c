# pyright: reportIncompleteStub=false
# Untyped: the package itself imports all of its models, which costs a type checker minutes and
# gigabytes.
from typing import Any

def __getattr__(name: str) -> Any: ...
