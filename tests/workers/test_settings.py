"""`--workers`: a number of processes, or a Ray cluster; what fits neither is refused with the reason."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tectum.config import Settings, ToldSettings
from tectum.errors import StartupError


@pytest.mark.parametrize("given", [3, "3"])
def test_a_number_is_that_many_processes_here(given, monkeypatch):
    assert (Settings.load(workers=given).workers, Settings.load(workers=given).lanes) == (3, 3)
    assert Settings.load(workers=given).ray_address is None
    monkeypatch.setenv("TECTUM_WORKERS", "5")
    assert Settings.load().lanes == 5


@pytest.mark.parametrize(("most", "lanes"), [(0, 4), (4, 4), (9, 9)])
def test_an_address_is_a_cluster(most, lanes):
    settings = Settings.load(workers="ray://head:10001", replicas=4, max_replicas=most)
    assert (settings.ray_address, settings.lanes) == ("ray://head:10001", lanes)


def test_an_encoder_has_the_settings_of_its_service_whatever_its_own_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TECTUM_DTYPE", "bfloat16")
    settings = Settings.load(workers="ray://auto", replicas=2, allowed_media_dir=tmp_path, fuse="auto")
    monkeypatch.setenv("TECTUM_DTYPE", "float16")
    monkeypatch.setenv("TECTUM_FORWARD_THREADS", "7")
    told = ToldSettings(**settings.model_dump(mode="json", exclude_unset=True))
    assert told.model_dump() == settings.model_dump()
    assert (
        told.model_fields_set
        == settings.model_fields_set
        == {
            "workers",
            "replicas",
            "allowed_media_dir",
            "fuse",
            "dtype",
        }
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"workers": 0}, "from 1 to 256"),
        ({"workers": "257"}, "from 1 to 256"),
        ({"workers": "two"}, "a number of processes, ray://HOST:PORT or ray://auto"),
        ({"workers": "ray://head"}, "ray://HOST:PORT"),
        ({"workers": "ray://head:0"}, "ray://HOST:PORT"),
        ({"workers": "ray://:10001"}, "ray://HOST:PORT"),
        ({"workers": "http://head:10001"}, "ray://HOST:PORT"),
        ({"replicas": 2}, "replicas has no effect without workers ray://"),
        ({"workers": 2, "workers_host": "10.0.0.5"}, "workers_host has no effect without workers ray://"),
        ({"workers": "ray://auto", "replicas": 3, "max_replicas": 2}, "max_replicas is 2"),
        ({"workers": "ray://auto", "device": "cuda:1"}, "Ray chooses which one"),
        ({"workers": "ray://auto", "workers_host": "0.0.0.0"}, "this machine's own address"),
    ],
)
def test_what_fits_neither_is_refused_with_the_reason(given, why):
    with pytest.raises(StartupError) as caught:
        Settings.load(**given)
    assert caught.value.code == "invalid_settings"
    assert why in caught.value.message


def test_without_ray_the_command_says_how_to_get_it():
    program = """
import sys
sys.modules["ray"] = None
sys.argv = ["tectum", "serve", "model", "--port", "0", "--workers", "ray://auto"]
from tectum.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert 'ray is not installed; run: pip install "tectum[ray]" [missing_dependency]' in done.stderr
    assert "Traceback" not in done.stderr
