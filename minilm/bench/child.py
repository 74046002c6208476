"""Work in a process of its own: what a process takes in memory or time can only be seen of a whole one."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def answer(function: Callable[[dict[str, Any]], None], config: dict[str, Any]) -> Any:
    """The JSON that function(config) prints in a new Python."""
    return json.loads(in_child(function, config, stdout=subprocess.PIPE, check=True).stdout)


def in_child(
    function: Callable[[dict[str, Any]], None], config: dict[str, Any], **options: Any
) -> subprocess.CompletedProcess[str]:
    """function(config) in a new Python; the function is one of a module, the configuration travels as JSON.

    options: of subprocess.run.
    """
    name = function.__name__
    code = f"import json, sys; from {function.__module__} import {name}; {name}(json.load(sys.stdin))"
    return subprocess.run([sys.executable, "-c", code], input=json.dumps(config), text=True, **options)
