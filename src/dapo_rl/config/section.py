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
    def _reject_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name:
            kinds = get_args(kind := cls.model_fields[info.field_name].annotation) or (kind,)
            if bool not in kinds and any(kind in (int, float) or type(kind) is int for kind in kinds):
                raise PydanticCustomError("switch_for_number", "expected a number")
        return value
