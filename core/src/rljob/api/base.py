"""Types that all models of the manifest share: names, text, quantities, labels, and the base model."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

Name = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63),
]
"""A name that is also valid as a Kubernetes label value: lower-case letters, digits and dashes."""

Text = Annotated[str, StringConstraints(max_length=4096)]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?([kMGTPE]i?)?$", max_length=63)]
"""Bytes as a Kubernetes quantity: 10Gi."""
Label = Annotated[str, StringConstraints(max_length=317)]
"""Label key: a name of at most 63 characters, optionally after a domain of at most 253 and a slash."""
Labels = Annotated[dict[Label, Annotated[str, StringConstraints(max_length=63)]], Field(max_length=64)]
"""Labels to match or to set."""
Variable = Annotated[str, StringConstraints(pattern=r"^(NCCL|TORCH_NCCL|GLOO|UCX|FI)_[A-Z0-9_]+$", max_length=63)]
"""Name of an environment variable of NCCL or of a library that NCCL uses."""
Collectives = Annotated[dict[Variable, Text], Field(max_length=64)]
"""Environment variables of the libraries that transfer tensors between processes."""
ResourceName = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=253
    ),
]
"""Name of an extended resource of a node."""
Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+", max_length=4096)]
"""Address of a service."""


class Model(BaseModel):
    """Base class of the manifest's models: camelCase aliases; unknown fields are refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        allow_inf_nan=False,
        defer_build=True,  # a model that is only a part of another is never built alone
    )
