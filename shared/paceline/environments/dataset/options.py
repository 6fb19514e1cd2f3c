"""The options of `dataset`: sources of rows, their mixture and split."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.data.shape import Columns, RowShape, Template
from paceline.plugins import StrictModel

Weight = Annotated[float, Field(gt=0.0, le=1e6)]


class SourceOptions(StrictModel):
    """One source: rows of files, or the tasks of an environment."""

    path: str = Field(default="", max_length=2048)
    """A file, folder or pattern of the job's data; or, if it begins with `/`, of a volume of the
    installation; or a URL of an object store. Empty: all of the job's data."""
    columns: Columns = Field(default_factory=dict[str, str])
    """Columns by the name that template, rewards and world know them by; `meta.level` is a part of
    one. Without any: all columns, under their own names."""
    template: Template = ""
    """The prompt, with `{name}` for columns; `{{name}}` stays as `{name}`. Without one, the prompt
    is the text of `question` or `prompt`, or the list of `messages`."""
    environment: str = Field(default="", max_length=256)
    """Instead of rows: tasks of this installed environment, played in its own world."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any], max_length=256)
    """Options of this environment."""
    weight: Weight | None = None
    """Share of the tasks, relative to the other sources; without any, each task is there once."""
    name: str = Field(default="", max_length=64, pattern=r"^[\w.-]*$")
    """Part of the domain of its tasks, by which metrics are told apart."""

    @property
    def shape(self) -> RowShape:
        """How its rows become tasks."""
        return RowShape(columns=self.columns, template=self.template)

    @model_validator(mode="after")
    def _either(self) -> SourceOptions:
        if self.environment and (self.path or self.columns or self.template):
            raise ValueError("environment and path, columns or template: one of them is allowed")
        if self.environment == "dataset":
            raise ValueError("environment: 'dataset' cannot be a source of itself")
        if self.options and not self.environment:
            raise ValueError("options: are those of an `environment`, which is missing")
        return self


class DatasetOptions(StrictModel):
    """Options of `dataset`."""

    sources: list[SourceOptions] = Field(
        default_factory=lambda: [SourceOptions()], min_length=1, max_length=64
    )
    """Sources that the tasks are mixed from; by default all of the job's data."""
    split: Literal["train", "heldout", "all"] = "train"
    """Which part of the rows; what a row asks decides on its part."""
    heldout_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of the rows that are held out."""
    size: Annotated[int, Field(gt=0, le=1 << 40)] | None = None
    """Tasks of an epoch. By default as many as it takes for every row to be there at least once."""
    order: Literal["mixed", "listed"] = "mixed"
    """`mixed`: sources and rows in an order by the seed; `listed`: as they are in the job and in
    their files, for samplers that start with the first ones."""
    system_prompt: str = Field(default="", max_length=32_768)
    """Shown before rows without a system message of their own."""

    def field_of(self, at: int, *, options: str = "tasks.options") -> str:
        """The user's name of a source: its field, or that of all data if none is named."""
        return f"{options}.sources.{at}" if "sources" in self.model_fields_set else "data.path"

    @model_validator(mode="after")
    def _fit_together(self) -> DatasetOptions:
        weighted = [source.weight is not None for source in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError("sources: either all of them have a weight, or none")
        names = [source.environment for source in self.sources if source.environment]
        if len(set(names)) < len(names):
            raise ValueError("sources: an environment may be there once")
        return self
