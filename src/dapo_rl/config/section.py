"""What all sections of settings have in common."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _accept_none_and_reject_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name is None:
            return value
        field = cls.model_fields[info.field_name]
        kinds = get_args(kind := field.annotation) or (kind,)
        # The help prints none for both; YAML's own word is null.
        if value == "none" and type(None) in kinds:
            return None
        if value in (None, "none") and field.default == ():
            return ()
        counts = bool not in kinds and any(kind in (int, float) or type(kind) is int for kind in kinds)
        if isinstance(value, bool) and counts:
            raise PydanticCustomError("switch_for_number", "expected a number")
        if value == "None" and counts and type(None) in kinds:
            raise PydanticCustomError("capital_none", "expected a number or none (in lower case)")
        return value
