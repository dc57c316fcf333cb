"""Python runs this when it starts, where `plancache run` put this folder on its path. Child processes inherit that.

A sitecustomize of the environment's own runs as ever. A Python that has no plancache runs its program without.
"""

import sys


def _environments_own() -> None:
    """Imports the sitecustomize that this one stands before."""
    import os

    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # no pathlib in every process of a program
    path = list(sys.path)
    this = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [folder for folder in path if os.path.abspath(folder or ".") != here]  # noqa: PTH100
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this
    finally:
        sys.path[:] = path


def _serve() -> None:
    try:
        from plancache.hook import when_imported
    except ImportError:
        sys.stderr.write(f"plancache: {sys.executable} has no plancache, so this process runs without it; install plancache there\n")
        return

    def install(_: object) -> None:
        from plancache.intercept import install as install_cache

        install_cache()

    when_imported("cudnn._pygraph", install)


try:
    _environments_own()
finally:  # Python says what is wrong with it, and runs the program
    _serve()
