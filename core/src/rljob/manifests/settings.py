"""A cluster's settings as a file has them: the chart writes it for the operator, a person for `rljob render`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from rljob.api.base import Model, Quantity
from rljob.api.errors import sentences
from rljob.manifests.context import PARTS, Cluster

_Word = Annotated[str, StringConstraints(min_length=1, max_length=253)]
AccessMode = Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]
_Defaults = Cluster()


class Images(Model):
    """Part → image."""

    coordinator: _Word = _Defaults.images["coordinator"]
    runner: _Word = _Defaults.images["runner"]
    trainer: _Word = _Defaults.images["trainer"]
    rollout: _Word = _Defaults.images["rollout"]
    rewards: _Word = _Defaults.images["rewards"]


class Settings(Model):
    """The fields of :class:`~rljob.manifests.context.Cluster`, all of them optional."""

    images: Images = Images()
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = _Defaults.image_pull_policy
    image_pull_secrets: Annotated[tuple[_Word, ...], Field(max_length=64)] = ()
    domain: _Word = _Defaults.domain
    storage_class: Annotated[str, Field(max_length=253)] = _Defaults.storage_class
    storage_size: Quantity = _Defaults.storage_size
    access_modes: Annotated[tuple[AccessMode, ...], Field(min_length=1, max_length=4)] = ("ReadWriteMany",)
    accelerator: Literal["nvidia", "cpu"] = _Defaults.accelerator
    gang: Literal["none"] = _Defaults.gang


def read_cluster(data: Mapping[str, Any]) -> Cluster:
    """Return the settings in ``data``, whose keys are those of a file: imagePullPolicy.

    Raises:
        ValueError: a line for each problem: which setting, and what is wrong with it.
    """
    try:
        read = Settings.model_validate_json(json.dumps(data), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ValueError("\n".join(sentences(error, Settings))) from None
    return Cluster(
        images={part: getattr(read.images, part) for part in PARTS},
        image_pull_policy=read.image_pull_policy,
        image_pull_secrets=read.image_pull_secrets,
        domain=read.domain,
        storage_class=read.storage_class,
        storage_size=read.storage_size,
        access_modes=read.access_modes,
        accelerator=read.accelerator,
        gang=read.gang,
    )
