"""Code of a user's own that a config names, as "my_module:name" or "my_module:name(setting=1)"."""

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import itertools
import math
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parallax.errors import ConfigError, nearest, quoted, shown
from parallax.storage.files import read_bytes
from parallax.version import PACKAGE, version_of

WRITTEN = re.compile(r"\s*([^\W\d][\w.]*):([^\W\d][\w.]*\s*(?:\(.*\))?)\s*", re.DOTALL)
# A name with its code; a parenthesis in quotes does not end the settings.
WRITTEN_SETTINGS = r"""\((?:[^()'"]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")*\)"""
# Or with settings alone.
BY_NAME = re.compile(
    rf"([^\W\d]\w*)=([^\W\d][\w.]*:[^\W\d][\w.]*(?:{WRITTEN_SETTINGS})?|{WRITTEN_SETTINGS})(?:\s+|$)", re.DOTALL
)
ALL_BY_NAME = re.compile(rf"\s*(?:{BY_NAME.pattern})+", re.DOTALL)
CODE_FORM = '"module:name" or "module:name(setting=1)"'
INSTALLED = {"site-packages", "dist-packages"}
LITERALS = (bool, int, float, str)
SOURCE_KEY = "source"  # the setting of a name that may be code, as in "lines=(source='lines:read', weight=2)"
BLOCK_KEY = "block"  # the entry of an object of settings that is code
IMPORT_ERROR_LETTERS = 400  # most characters of another program's error
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class UserCode(str):
    """The text in a config that names code, with the function or class `target` that it names and its `settings`.

    It is a text wherever settings are printed, saved or compared. Two of them are equal if they name the same object,
    so that nothing computed with a class of a notebook is used for a later class of that name. `source` is the SHA-256
    of the code's files, or name and version of the installed package that has it; "" if there is neither. The text of a
    saved config has no target: its folder may come from somebody else, and a run's folder imports nothing.
    """

    target: Any
    settings: Mapping[str, Any]
    source: str

    def __new__(cls, text: str, target: Any = None, settings: Mapping[str, Any] | None = None, source: str = ""):
        code = super().__new__(cls, text)
        code.target, code.settings, code.source = target, dict(settings or {}), source
        return code

    @property
    def installed(self) -> dict[str, str]:
        """The version of the installed package that has the code, by its name; empty for code in files of one's own.

        >>> UserCode("optax:lion", source="optax 0.2.5").installed, UserCode("lion:make", source="0cc175b9").installed
        ({'optax': '0.2.5'}, {})
        """
        package, space, version = self.source.partition(" ")
        return {package: version} if space else {}

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, str) and str.__eq__(self, other)
        return same and (not isinstance(other, UserCode) or self.target == other.target)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __deepcopy__(self, memo: dict) -> "UserCode":
        return self  # as any text

    def __reduce__(self) -> tuple:
        return str, (str(self),)  # another process gets the text


def names_code(value: object) -> bool:
    """Whether a value of a config names code.

    >>> [names_code(value) for value in ("lion:make(b1=0.9)", "adamw", "order.csv", "gs://bucket")]
    [True, False, False, False]
    """
    if isinstance(value, UserCode):
        return True
    return isinstance(value, str) and bool(WRITTEN.fullmatch(value) or codes_by_name(value))


def codes_by_name(value: str) -> dict[str, str]:
    """The code of each name in a text "name=module:name name=module:name(setting=1)", or "name=(source='module:name')";
    empty for other texts.

    >>> codes_by_name("wide=blocks:Wide(width=4) deep=blocks:Deep"), codes_by_name("embedding=zero1")
    ({'wide': 'blocks:Wide(width=4)', 'deep': 'blocks:Deep'}, {})
    """
    if isinstance(value, UserCode) and isinstance(value.target, Mapping):
        return dict(value.target)
    return _by_name(value)[0] | code_of_sources(value)


def code_of_sources(value: str) -> dict[str, str]:
    """The code that is the source of a name, by name.

    >>> code_of_sources("mine=(source='lines:read(least=2)', weight=2) web=(path='web')")
    {'mine': 'lines:read(least=2)'}
    """
    sources = {}
    for name, text in _by_name(value)[1].items():
        with contextlib.suppress(ConfigError):  # which the check of the key reports
            sources[name] = _parsed("", value, f"settings{text}")[1].get(SOURCE_KEY)
    return {name: code for name, code in sources.items() if isinstance(code, str) and WRITTEN.fullmatch(code)}


def settings_by_name(key: str, value: Any) -> dict[str, dict[str, Any]]:
    """The settings of each name in such a text "name=(setting=value)", or in an object of objects.

    >>> settings_by_name("model.kinds", "near=(sliding_window=16, rope=False) wide=blocks:Wide(width=4)")
    {'near': {'sliding_window': 16, 'rope': False}}
    """
    if isinstance(value, Mapping):
        given = {name: each for name, each in value.items() if isinstance(each, Mapping)}
        return {name: {k: v for k, v in each.items() if k != BLOCK_KEY} for name, each in given.items()}
    return {name: _parsed(key, value, f"settings{text}")[1] for name, text in _by_name(value)[1].items()}


def settings_text(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """The canonical text of settings by name.

    >>> settings_text({"near": {"sliding_window": 16}, "far": {}})
    'far=() near=(sliding_window=16)'
    """
    return " ".join(f"{name}={_text('', each) or '()'}" for name, each in sorted(settings.items()))


def with_settings(key: str, value: Any, changes: Mapping[str, Mapping[str, Any]]) -> Any:
    """Code and settings by name, a text or an object, with other settings of some names; code of a saved config is as
    before not imported.

    >>> with_settings("model.kinds", "near=(rope=False) wide=blocks:Wide", {"near": {"sliding_window": 4}})
    'wide=blocks:Wide near=(rope=False, sliding_window=4)'
    """
    settings = settings_by_name(key, value)
    settings |= {name: settings.get(name, {}) | each for name, each in changes.items()}
    if isinstance(value, Mapping):
        return settings | {name: {**settings.get(name, {}), BLOCK_KEY: code} for name, code in _codes_of(value).items()}
    text = " ".join([*(f"{name}={code}" for name, code in _by_name(value)[0].items()), settings_text(settings)])
    return UserCode(text) if isinstance(value, UserCode) else text


@functools.lru_cache(maxsize=64)  # a plan reads the same text for each of many models
def _by_name(value: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The texts by name of code and of settings alone; empty if some name has two of a sort, or it is another text."""
    pairs = BY_NAME.findall(value) if ALL_BY_NAME.fullmatch(value) else []
    codes, settings = ([pair for pair in pairs if pair[1].startswith("(") == alone] for alone in (False, True))
    alike = len(dict(codes)) == len(codes) and len(dict(settings)) == len(settings)
    return (MappingProxyType(dict(codes)), MappingProxyType(dict(settings))) if alike else ({}, {})


def imported_code(key: str, value: Any, given: Sequence[str] = ()) -> Any:
    """A value of `key`, with its code if it names some or is some: a function or a class, or a functools.partial of one
    with settings. Other values, and texts of saved configs, are returned as they are. `given` are the arguments with
    which Parallax calls the code: see `check_call`.

    A module is found as Python finds it, then in the current folder. Raises ConfigError if there is none, if importing
    it fails, or if the code has no such settings.
    """
    if isinstance(value, UserCode):
        return value
    if isinstance(value, str) and (sources := code_of_sources(value)):
        return _of_sources(key, value, sources, given)
    if isinstance(value, Mapping) or (isinstance(value, str) and (named := _by_name(value)) != ({}, {})):
        codes = _codes_of(value) if isinstance(value, Mapping) else named[0]
        return _of_names(key, value, codes, given)
    if isinstance(value, str):
        return _of_text(key, value, given) if names_code(value) else value
    return _of_object(key, value, given) if callable(value) else value


def _codes_of(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """The code of each name in an object, or in the objects of settings in it."""
    codes = {name: each.get(BLOCK_KEY) if isinstance(each, Mapping) else each for name, each in by_name.items()}
    return {name: code for name, code in codes.items() if code is not None or not isinstance(by_name[name], Mapping)}


def _of_sources(key: str, value: str, sources: Mapping[str, str], given: Sequence[str]) -> UserCode:
    imported = {name: imported_code(f"{key}.{name}.{SOURCE_KEY}", code, given) for name, code in sources.items()}
    return UserCode(value, imported, source=_hash(*(code.source for code in imported.values())))


def _of_names(key: str, value: Any, codes: Mapping[str, Any], given: Sequence[str]) -> Any:
    settings = settings_by_name(key, value)
    if wrong := [name for name in (*codes, *settings) if not (isinstance(name, str) and name.isidentifier())]:
        raise ConfigError(f"{key}: {quoted(wrong[0])} is not a name; use letters, digits and _")
    imported = {name: imported_code(f"{key}: {name}", code, given) for name, code in codes.items()}
    if not all(isinstance(code, UserCode) for code in imported.values()):
        return value
    texts = [*(f"{name}={code}" for name, code in imported.items()), *filter(None, [settings_text(settings)])]
    if not imported:
        return " ".join(texts)
    return UserCode(" ".join(texts), imported, source=_hash(*(code.source for code in imported.values())))


def saved_code(key: str, value: Any) -> Any:
    """The same of a saved config: a text that names code, which is not imported.

    Raises ConfigError for a value that no run writes, as an object of texts, in which code could be named, too.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{key}={quoted(value)} is {type(value).__name__}, but it must be a text in quotes")
    return UserCode(value) if names_code(value) else value


def named(key: str, value: str, known: Mapping[str, Any]) -> Callable:
    """What a setting chooses: the entry of `known`, or its code with its settings.

    Raises ConfigError for code of a saved config.
    """
    if not names_code(value):
        return known[value]
    code = value if isinstance(value, UserCode) else UserCode(value)
    refuse_saved({key: code})
    return functools.partial(code.target, **code.settings) if code.settings else code.target


def refuse_saved(codes: Mapping[str, UserCode]) -> None:
    """Raise ConfigError if some of this code, by key, is that of a saved config."""
    saved = {key: code for key, code in codes.items() if code.target is None}
    if not saved:
        return
    texts = " and ".join(f"{key}={quoted(code)}" for key, code in saved.items())
    flags = " ".join(f"--config.{key}={shlex.quote(shown(code))}" for key, code in saved.items())
    names = ", ".join(f"{key!r}: ..." for key in saved)
    raise ConfigError(
        f"{texts} {'names' if len(saved) == 1 else 'name'} code, and the saved config of a run imports none, since its "
        f"folder may come from somebody else; if this code is yours, write {flags} on the command line, or "
        f"code={{{names}}} in a notebook."
    )


def check_call(key: str, code: UserCode, given: Sequence[str]) -> None:
    """Raise ConfigError unless code can be called with the arguments `given`, by name, besides its settings. Those that
    end in "?" are given only if the code has them."""
    if isinstance(code.target, Mapping):
        for name, each in code.target.items():
            check_call(f"{key}: {name}", each, given)
        return
    parameters = _parameters(code.target)
    if parameters is None:
        return
    name, names = name_in_module(code), [argument.removesuffix("?") for argument in given]
    needed = [argument for argument in given if not argument.endswith("?")]
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    for setting in code.settings:
        if setting in names:
            raise ConfigError(f"{key}={quoted(code)}: {setting} is not a setting of {name}, since Parallax gives it.")
    if missing := [argument for argument in needed if argument not in parameters and not takes_any]:
        raise ConfigError(
            f"{key}={quoted(code)}: {name} has no parameter {missing[0]!r}; Parallax calls it with {', '.join(needed)}."
        )
    known = (*names, *code.settings)
    open_ = {each: about for each, about in parameters.items() if each not in known and about.kind not in VARIADIC}
    if missing := [each for each, about in open_.items() if about.default is about.empty]:
        example = _text(code, {**code.settings, missing[0]: ...})
        instead = f", or call it what Parallax gives: {', '.join(names)}" if names else ""
        raise ConfigError(f"{key}={quoted(code)} has no {missing[0]}, which {name} needs; write {example!r}{instead}.")


def name_in_module(code: UserCode) -> str:
    """The name of a function or class in its module.

    >>> name_in_module(UserCode("lion:make(b1=0.9)"))
    'make'
    """
    return code.partition("(")[0].partition(":")[2]


def takes(code: UserCode, name: str) -> bool:
    """Whether code has a parameter of this name."""
    return name in (_parameters(code.target) or {})


# ---- from a text


def _of_text(key: str, text: str, given: Sequence[str]) -> UserCode:
    module_name, call = WRITTEN.fullmatch(text).groups()
    name, settings = _parsed(key, text, call.strip())
    module = _module(key, text, module_name)
    target = module
    for part in name.split("."):
        if not hasattr(target, part):
            public = [known for known in vars(target) if not known.startswith("_")]
            raise ConfigError(f"{key}={quoted(text)}: {module_name} has no {part!r}; {nearest(part, public)}")
        target = getattr(target, part)
    return _made(key, f"{module_name}:{name}", target, settings, _source_of(module), given)


def _parsed(key: str, text: str, call: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings of "name(setting=value, ...)"."""
    try:
        tree = ast.parse(call, mode="eval").body
        if isinstance(tree, ast.Call):
            if tree.args or any(word.arg is None for word in tree.keywords):
                raise ValueError("settings have names")
            return ast.unparse(tree.func), {word.arg: ast.literal_eval(word.value) for word in tree.keywords}
        return ast.unparse(tree), {}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        why = error.msg if isinstance(error, SyntaxError) else f"{error}".split(" on line")[0]
        raise ConfigError(
            f"{key}={quoted(text)} cannot be read as {CODE_FORM}: {why}; settings are NAME=VALUE, with numbers, texts, "
            "True and False as values."
        ) from None


def _module(key: str, text: str, name: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _failed(key, text, name, error) from error
        raise ConfigError(
            f"{key}={quoted(text)}: there is no module {name!r} where Python looks, nor in {here}; start in its "
            "folder, or add the folder to PYTHONPATH."
        ) from None
    except (Exception, SystemExit) as error:  # a script may end itself
        raise _failed(key, text, name, error) from error


def _failed(key: str, text: str, name: str, error: BaseException) -> ConfigError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    what = shown(" ".join(f"{type(error).__name__}: {error}".split()), IMPORT_ERROR_LETTERS)
    return ConfigError(f"{key}={quoted(text)}: importing {name} failed with {what}{where}")


# ---- from an object


def _of_object(key: str, target: Any, given: Sequence[str]) -> UserCode:
    settings: dict[str, Any] = {}
    while isinstance(target, functools.partial):
        if target.args:
            raise ConfigError(f"{key}={quoted(target)}: give settings by name, as functools.partial(name, setting=1).")
        target, settings = target.func, {**target.keywords, **settings}
    name, home = (getattr(target, about, None) for about in ("__qualname__", "__module__"))
    if name is None or home is None:
        raise ConfigError(f"{key}={quoted(target)} is not a function or a class; give one, or {CODE_FORM}.")
    source = _source_of(sys.modules.get(home))
    with contextlib.suppress(OSError, TypeError):  # typed into an interpreter
        source = source or _hash(inspect.getsource(target))  # of a notebook's cell
    text = f"{home}:{name.replace('<locals>.', '').replace('<lambda>', 'lambda')}"
    if not WRITTEN.fullmatch(text):  # a saved config could not be read
        raise ConfigError(f"{key} has a name that no config can hold, {quoted(text)}; define it in a module.")
    return _made(key, text, target, settings, source, given)


def _made(key: str, name: str, target: Any, settings: Mapping[str, Any], source: str, given: Sequence[str]) -> UserCode:
    if not callable(target):
        raise ConfigError(f"{key}={quoted(name)} is a {type(target).__name__}, not a function or a class.")
    parameters = _parameters(target)
    settings = {setting: _plain(value) for setting, value in settings.items()}
    for setting, value in settings.items():
        if not isinstance(value, LITERALS):
            kind = type(value).__name__
            wrong = f"{name} has {setting}={quoted(value)}, a {kind}"
            raise ConfigError(f"{key}: {wrong}; use a number, a text, True or False.")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}: {name} has {setting}={value!r}, which no config holds; use a finite number.")
        if parameters is None or any(parameter.kind in VARIADIC for parameter in parameters.values()):
            continue
        if setting not in parameters or parameters[setting].kind == inspect.Parameter.POSITIONAL_ONLY:
            settable = [
                known
                for known, parameter in parameters.items()
                if parameter.kind != parameter.POSITIONAL_ONLY and not {known, f"{known}?"} & {*given}
            ]
            raise ConfigError(f"{key}: {name} has no setting {setting!r}; {nearest(setting, settable)}")
        _check_type(key, name, setting, value, parameters[setting].annotation)
    return UserCode(_text(name, settings), target, settings, source)


def _plain(value: Any) -> Any:
    """A number or text without its subclass, as NumPy's of float, which Python prints in another way."""
    return next((kind(value) for kind in LITERALS if isinstance(value, kind)), value)


def _text(name: str, settings: Mapping[str, Any]) -> str:
    """The canonical text.

    >>> _text("lion:make", {"b2": 0.98, "b1": 0.9})
    'lion:make(b1=0.9, b2=0.98)'
    """
    written = ", ".join(f"{key}={'...' if value is ... else repr(value)}" for key, value in sorted(settings.items()))
    return f"{name.split('(')[0]}({written})" if written else str(name)


def _check_type(key: str, name: str, setting: str, value: Any, wanted: Any) -> None:
    if isinstance(wanted, str):  # under `from __future__ import annotations`
        wanted = {kind.__name__: kind for kind in LITERALS}.get(wanted)
    if not any(wanted is kind for kind in LITERALS):  # other annotations may be anything, hashable or not
        return
    fits = isinstance(value, int | float if wanted is float else wanted)
    if not fits or (wanted is not bool and isinstance(value, bool)):
        raise ConfigError(
            f"{key}: {name} has {setting}={quoted(value)}, a {type(value).__name__}; it must be a {wanted.__name__}."
        )


def _parameters(target: Any) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a call; None if Python does not know them. Those that Flax adds to modules are left out."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None
    return {name: parameter for name, parameter in parameters.items() if name not in ("parent", "name")}


def _source_of(module: Any) -> str:
    """The SHA-256 of a module's file, and of the files that it imports from its own folder or below, but not of
    Parallax, whose version is compared by itself; of an installed package its name and version."""
    file = getattr(module, "__file__", None)
    if not file:
        return ""
    if _is_installed(Path(file)):
        top = module.__name__.partition(".")[0]
        package = packages_distributions().get(top, [top])[0]  # yaml, say, is of PyYAML
        return f"{package} {version_of(package)}"
    first = Path(file).resolve()
    package = [*filter(None, (module.__package__ or "").split("."))]
    roots = {first.parent, first.parents[len(package)]}  # where a script and a package find their modules
    files: dict[Path, str] = {}
    left = [first]
    while left:
        path = left.pop()
        outside = not path.is_relative_to(first.parent) or path.is_relative_to(PACKAGE.resolve()) or _is_installed(path)
        if path not in files and not outside and path.is_file():
            content = read_bytes(path)
            files[path] = hashlib.sha256(content).hexdigest()
            left += _imported_by(path, content, roots)
    return _hash(*(files[path] for path in sorted(files)))


def _imported_by(path: Path, content: bytes, roots: Iterable[Path]) -> Iterator[Path]:
    """Files that may be those of a file's imports, wherever in it they are: its statements say which, since a module
    does not show from where a number came."""
    try:
        statements = [*ast.walk(ast.parse(content))]
    except (SyntaxError, ValueError):  # not Python, or changed since
        return
    for each in statements:
        if isinstance(each, ast.Import | ast.ImportFrom):
            above = [path.parents[each.level - 1]] if getattr(each, "level", 0) else roots
            start = f"{module}." if (module := getattr(each, "module", None)) else ""
            for root, alias in itertools.product(above, each.names):
                parts = f"{start}{alias.name}".split(".")
                for place in itertools.accumulate(parts, Path.joinpath, initial=root):
                    yield from (place / "__init__.py", place.with_suffix(".py"))


def _is_installed(path: Path) -> bool:
    return bool(INSTALLED & {*path.parts})


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
