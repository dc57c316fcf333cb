"""Settings: arguments, then the environment, then defaults, each value with where it came from."""

from __future__ import annotations

import pytest

from plancache import PlanCache, Settings
from plancache.errors import SettingsError


def test_arguments_come_before_the_environment_and_both_before_defaults(tmp_path):
    """Each value says where it came from."""
    environ = {"PLANCACHE_DIR": "/elsewhere", "PLANCACHE_BUILD": "forbid", "PLANCACHE_STRICT": "1", "PLANCACHE_LOCK_TIMEOUT_S": "2.5"}
    settings = Settings.load(environ, directory=tmp_path)
    assert (settings.directory, settings.build, settings.strict, settings.lock_timeout_s) == (tmp_path, "forbid", True, 2.5)
    assert settings.sources["directory"] == "argument"
    assert settings.sources["build"] == "PLANCACHE_BUILD"
    assert settings.sources["mode"] == "default"
    assert Settings.load({}).directory.name == "plancache"


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("PLANCACHE_MODE", "fast", "readwrite, readonly, off"),
        ("PLANCACHE_BUILD", "lookup", "allow, forbid"),
        ("PLANCACHE_STRICT", "perhaps", "1 or 0"),
        ("PLANCACHE_LOCK_TIMEOUT_S", "soon", "a number of seconds"),
        ("PLANCACHE_LOCK_TIMEOUT_S", "-1", "0 or more"),
        ("PLANCACHE_LOCK_TIMEOUT_S", "inf", "finite"),
        ("PLANCACHE_DIR", "relative/path", "absolute"),
        ("PLANCACHE_TAG", " serve", "printable characters, without blanks around"),
        ("PLANCACHE_TAG", "x" * 101, "1 to 100"),
    ],
)
def test_a_bad_variable_is_named_with_its_value_and_what_it_may_be(variable, value, says):
    """A variable that cannot be read is an error, never a silent default."""
    with pytest.raises(SettingsError, match=says) as caught:
        Settings.load({variable: value})
    assert variable in str(caught.value)
    assert value in str(caught.value)


@pytest.mark.parametrize("tag", ["", 7, b"serve", "two\nlines", " serve", "x" * 101])
def test_a_tag_that_is_no_name_is_refused(tmp_path, tag):
    """It is shown in tables and given on command lines."""
    with pytest.raises(SettingsError, match="tag must be a short printable name"):
        PlanCache(tmp_path, tag=tag)


def test_an_unknown_setting_is_refused(tmp_path):
    """A misspelt option is an error that lists the names."""
    with pytest.raises(SettingsError, match="unknown setting 'stric'"):
        PlanCache(tmp_path, stric=True)
