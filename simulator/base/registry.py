"""Registry: finds the objects of one interface by name, built in or from outside the package.

An object from outside is defined in one of two ways (`plugins.py`):

* An installed package has an entry point, a subclass of the interface or an instance of one. It is
  found by the name of the entry point.
* A `.py` file defines one subclass of the interface. It is found by the path of the file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.names import suggestion

T = TypeVar("T")


class Registry(Generic[T]):
    """Finds the objects of `interface`. Objects from outside are loaded once, and those in a file
    again after the file has changed.
    """

    def __init__(
        self,
        what: str,
        interface: type[T],
        home: str,
        built_in: Mapping[str, T],
        *,
        group: str,
        refuse: Callable[[T, str], None] = lambda *_: None,
    ) -> None:
        """Makes a registry of the built-in objects.

        Args:
            what: What errors call one object, such as "policy".
            interface: The base class.
            home: The module that users import the interface from.
            built_in: The built-in objects by name.
            group: The entry point group of installed objects.
            refuse: Raises UserError for an object from outside that cannot be used. The second
                argument says where the object comes from.
        """
        self._what, self._interface, self._home, self._built_in = what, interface, home, built_in
        self.group, self._refuse = group, refuse
        self._loaded: dict[str, T] = {}
        plugins.on_forget(self._loaded.clear)

    def registered(self) -> list[str]:
        """Returns the names of all built-in and installed objects in alphabetical order."""
        return sorted({*self._built_in, *self._installed()})

    def find(self, name: str) -> T:
        """Returns the object `name`, which is a registered name or the path of a `.py` file.

        Raises UserError if there is none, or if loading it fails.
        """
        plugins.refresh()
        if name in self._built_in:
            return self._built_in[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _installed(self) -> list[str]:
        """Returns the names of installed objects. They cannot replace a built-in object."""
        return [name for name in plugins.installed(self.group) if name not in self._built_in]

    def _load(self, name: str) -> T:
        if name.endswith(".py"):
            return self._from_file(name)
        if name in self._installed():
            loaded = plugins.load(self.group, name)
            where = f"entry point {plugins.installed(self.group)[name].value}"
            return self._checked(loaded() if inspect.isclass(loaded) else loaded, where)
        listed = f"a name that `megatrain list {self.group.rpartition('.')[2]}` prints"
        raise UserError(
            self._what,
            found=repr(name),
            allowed=f"{listed}, or a .py file that defines {plugins.with_article(self._what)}",
            fix=suggestion(name, self.registered(), "name one of these"),
        )

    def _from_file(self, path: str) -> T:
        module = plugins.load_file(self._what, path)
        classes = [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, self._interface)
            and value.__module__ == module.__name__
        ]
        bases = {base for value in classes for base in value.__bases__}
        leaves = [value for value in classes if value not in bases]
        if len(leaves) != 1:
            raise UserError(
                f"{self._what} {path}",
                found=f"{len(leaves)} subclasses of {self._interface.__name__}",
                allowed="one",
                fix=f"define one {self._what} per file",
            )
        return self._checked(leaves[0](), path)

    def _checked(self, value: object, where: str) -> T:
        """Returns `value`. Raises UserError if it does not have the interface, or is refused."""
        where = f"{self._what} {where}"
        if not isinstance(value, self._interface):
            raise UserError(
                where,
                found=type(value).__name__,
                allowed=f"a subclass of {self._home}.{self._interface.__name__}",
                fix="see docs/adding.md",
            )
        self._refuse(value, where)
        return value
