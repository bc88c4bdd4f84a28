"""The container files, read: no engine runs here. hadolint has its say where it is installed (`make deploy-tools`)."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from typing import Any

import pytest
import yaml

from stowage.config.settings import SETTINGS
from tests.deploy.conftest import DEPLOY, ROOT

DOCKER = DEPLOY / "docker"
LINES = re.sub(r"\\\n\s*", "", (DOCKER / "Dockerfile").read_text()).splitlines()
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVER = SERVICES["stowage"]
GRACE_S = float(SETTINGS["shutdown_timeout_s"].default) + 30


def instructions(word: str) -> list[str]:
    """What follows that word, in order."""
    return [line.partition(" ")[2] for line in LINES if line.startswith(word + " ")]


def test_hadolint_finds_nothing() -> None:
    tool = shutil.which("hadolint", path=f"{ROOT / '.deploy-tools' / 'bin'}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("hadolint is not installed (make deploy-tools)")
    done = subprocess.run([tool, str(DOCKER / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_copies_what_there_is() -> None:
    own = [words.split()[:-1] for words in instructions("COPY") if not words.startswith("--from")]
    assert own and all((ROOT / path).exists() for paths in own for path in paths)


def test_it_installs_what_is_pinned_and_nothing_else() -> None:
    installs = [line for line in instructions("RUN") if "pip install" in line]
    assert len(installs) == 3 and "--constraint requirements/runtime.txt" in installs[0]
    assert installs[1].endswith("--requirement requirements/runtime.txt") and "--no-deps" in installs[2]
    assert not any("dev.txt" in line or "apt-get" in line for line in LINES)


def test_the_server_is_nobody_and_its_files_are_in_the_volume() -> None:
    user = instructions("USER")[-1]
    assert re.fullmatch(r"\d+:\d+", user) and user.split(":")[0] in instructions("RUN")[-1]
    (volume,) = instructions("VOLUME")
    environment = dict(re.findall(r"(\w+)=(\S+)", instructions("ENV")[-1]))
    assert environment["HF_HOME"].startswith(volume) and environment["HOME"] == volume
    assert "--owner stowage" in instructions("RUN")[-1] and f" {volume}" in instructions("RUN")[-1]


def test_its_health_is_asked_where_no_key_is_needed() -> None:
    (check,) = instructions("HEALTHCHECK")
    port = instructions("EXPOSE")[0]
    assert f"http://127.0.0.1:{port}/health" in check and "--start-period" in check
    environment = dict(re.findall(r"(\w+)=(\S+)", instructions("ENV")[-1]))
    assert environment["STOWAGE_HOST"] == "0.0.0.0" and port == str(SETTINGS["port"].default)
    assert instructions("STOPSIGNAL") == ["SIGTERM"]


def test_the_health_check_works() -> None:
    """The program in it, against a server that answers and one that does not."""
    program = yaml.safe_load(instructions("HEALTHCHECK")[0].partition("CMD ")[2])
    assert program[0] == "python"

    class Answers(http.server.BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(self.status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = program[2].replace(":8000", f":{server.server_port}")
        for status, expected in ((200, 0), (503, 1)):
            Answers.status = status
            assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == expected
        server.shutdown()


@pytest.mark.parametrize("name", SERVICES)
def test_each_service(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped" and set(service["networks"]) <= COMPOSE["networks"].keys()
    assert ":" in service["image"] or "build" in service, "a version"
    assert service.get("read_only") or name == "prometheus"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        assert (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
    for other in service.get("depends_on", []):
        assert other in SERVICES
    assert set(service.get("secrets", [])) <= COMPOSE.get("secrets", {}).keys()


def test_the_servers_settings_exist_and_it_has_time_to_stop() -> None:
    names = [name for name in SERVER["environment"] if name.startswith("STOWAGE_")]
    known = {f"STOWAGE_{setting.upper()}" for setting in SETTINGS} | {"STOWAGE_API_KEYS"}
    assert names and set(names) <= known
    assert float(SERVER["stop_grace_period"].removesuffix("s")) >= GRACE_S + 4
    assert (
        SERVER["build"]["dockerfile"] == "deploy/docker/Dockerfile"
        and (DOCKER / SERVER["build"]["context"]).resolve() == ROOT
    )
    assert SERVER["command"][0] == "serve"


def test_the_example_names_every_variable() -> None:
    used = set(re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text()))
    given = set(re.findall(r"^(\w+)=", (DOCKER / "example.env").read_text(), re.MULTILINE))
    assert given <= used and used - given == {"HF_TOKEN"}
    must = set(re.findall(r"\$\{(\w+):\?", (DOCKER / "compose.yaml").read_text()))
    assert must <= given


def test_prometheus_and_grafana_find_what_they_need() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["stowage:8000"] and "stowage" in SERVICES
    assert job["authorization"]["credentials_file"] == "/run/secrets/" + SERVICES["prometheus"]["secrets"][0]
    assert all((DEPLOY / "prometheus" / name).exists() for name in config["rule_files"])
    provisioning = DEPLOY / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    provider = yaml.safe_load((provisioning / "dashboards" / "stowage.yml").read_text())["providers"][0]
    assert f"../grafana/stowage.json:{provider['options']['path']}/stowage.json:ro" in SERVICES["grafana"]["volumes"]
