"""YAML that people write: read as it stands, or refused where YAML would take it for something else in silence.

Notable: plain YAML keeps the last of two equal keys, and reads 010 as eight and 1:30 as ninety. A suite or a policy
would then measure or allow something else than it says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from driftgate.errors import InputError

__all__ = ["read_yaml"]

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")


class _Loader(yaml.SafeLoader):
    """What ``yaml.safe_load`` takes, without equal keys and without integers that are not decimal."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"{key.value} stands twice in one mapping; name it once", key.start_mark
                    )
                seen.add(key.value)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if _INTEGER.fullmatch(node.value) is None:
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value} would be read as another number; write it in decimal digits", node.start_mark
            )
        number: int = super().construct_yaml_int(node)
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read_yaml(path: Path) -> Any:
    """What a YAML file holds.

    Raises:
        InputError: it cannot be read, is no YAML, has two equal keys in a mapping, or an integer that is not decimal.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} is no readable YAML: {' '.join(str(error).split())}") from error
