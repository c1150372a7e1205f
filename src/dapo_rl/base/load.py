"""Loads the function that a setting names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dapo_rl.base.home import expanded
from dapo_rl.base.quote import describe
from dapo_rl.base.suggest import did_you_mean, nearest, nearest_path
from dapo_rl.errors import UserError

OF_FILE = "_dapo_rl_user_"


def load_function(spec: str) -> Callable[..., Any]:
    """The function that `module:name` or `file.py:name` names; a file is relative to the current directory."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise UserError(f"{spec!r}: a function is named module:name or file.py:name, for example rewards.py:score")
    module = _load_file(expanded(where), spec) if where.endswith(".py") else _load_module(where, spec)
    try:
        function = getattr(module, name)
    except AttributeError:
        close = nearest(name, [n for n in vars(module) if callable(vars(module)[n])])
        hint = did_you_mean(close and f"{where}:{close}")
        raise UserError(f"{spec}: {where} has no {name!r}{hint}") from None
    except BaseException as error:  # a module may compute its attributes
        raise _import_error(spec, error) from error
    if not callable(function):
        raise UserError(f"{spec}: expected a function, got {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def modules_of_files() -> list[ModuleType]:
    """The modules of files that settings have named. Other processes cannot import them by their names."""
    return [module for name, module in list(sys.modules.items()) if name.startswith(OF_FILE)]


def spec_of(thing: Any) -> str:
    """`module:name` of a function or class, or of an object's class, in the form used in settings."""
    return f"{getattr(thing, '__module__', '?')}:{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _load_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        hint = did_you_mean(nearest_path(path, lambda neighbour: neighbour.name.endswith(".py")))
        raise UserError(f"{spec}: no such file: {path} (from {Path.cwd()}){hint}")
    path = path.resolve()
    # Functions from the same file share a module; a changed file is loaded again.
    name = f"{OF_FILE}{path.stem}_{zlib.crc32(f'{path} {path.stat().st_mtime_ns}'.encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"{spec}: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(module_spec)
    _make_importable(path.parent)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _import_error(spec, error) from error
    return module


def _load_module(name: str, spec: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UserError(
                f"{spec}: no module {error.name!r}, neither installed nor in {Path.cwd()}; a file is named file.py:name"
            ) from None
        raise _import_error(spec, error) from error
    except BaseException as error:
        raise _import_error(spec, error) from error


def _make_importable(directory: Path) -> None:
    """Appends a directory to `sys.path`, so that a user's file can import its neighbours without shadowing installed
    packages."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _import_error(spec: str, error: BaseException) -> BaseException:
    """The error to raise for an exception from a module, including SystemExit; KeyboardInterrupt is unchanged."""
    if isinstance(error, KeyboardInterrupt | UserError):
        return error
    return UserError(f"{spec}: importing it failed: {describe(error)}")
