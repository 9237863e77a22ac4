"""What every part of the manifest is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints
from pydantic.alias_generators import to_camel

Name = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63),
]
"""A name as Kubernetes allows it for a label: lower-case letters, digits and dashes."""

Text = Annotated[str, StringConstraints(max_length=4096)]


class Model(BaseModel):
    """Base of every part of the manifest."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
