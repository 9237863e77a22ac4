"""What every part of the manifest is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

Name = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63),
]
"""A name as Kubernetes allows it for a label: lower-case letters, digits and dashes."""

Text = Annotated[str, StringConstraints(max_length=4096)]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?([kMGTPE]i?)?$", max_length=63)]
"""An amount of bytes as Kubernetes writes it: 10Gi."""
Label = Annotated[str, StringConstraints(max_length=317)]
"""Key of a label: a name of 63 characters, and before a slash a domain of 253."""
Labels = Annotated[dict[Label, Annotated[str, StringConstraints(max_length=63)]], Field(max_length=64)]
"""Labels that something must have."""
Variable = Annotated[str, StringConstraints(pattern=r"^(NCCL|TORCH_NCCL|GLOO|UCX|FI)_[A-Z0-9_]+$", max_length=63)]
"""Name of an environment variable of NCCL, or of what it works with."""
Collectives = Annotated[dict[Variable, Text], Field(max_length=64)]
"""Variables of the libraries that carry tensors between processes."""
ResourceName = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=253
    ),
]
"""Name of an extended resource of nodes."""
Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+", max_length=4096)]
"""Address of a service."""


class Model(BaseModel):
    """Base of every part of the manifest."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
