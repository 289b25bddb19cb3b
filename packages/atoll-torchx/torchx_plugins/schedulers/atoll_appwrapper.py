"""The plug-in of newer versions of TorchX, which look for modules of this namespace package.

They also read the entry points of this distribution, and warn if both name one scheduler. So this module registers
the schedulers only where entry points are switched off (`TORCHX_PLUGINS_SOURCE=1`).
"""

import os
from typing import Any

from torchx.plugins import register

_ENTRY_POINTS = 2
_source = os.environ.get("TORCHX_PLUGINS_SOURCE", "3")

if _source.isdecimal() and not int(_source) & _ENTRY_POINTS:

    @register.scheduler(name="kubernetes_mcad")
    def kubernetes_mcad(session_name: str, **kwargs: Any) -> Any:
        from atoll.torchx.kubernetes_mcad_scheduler import create_scheduler

        return create_scheduler(session_name, **kwargs)

    @register.scheduler(name="appwrapper")
    def appwrapper(session_name: str, **kwargs: Any) -> Any:
        from atoll.torchx.kubernetes_mcad_scheduler import create_appwrapper_scheduler

        return create_appwrapper_scheduler(session_name, **kwargs)
