"""Two installations into one cluster at the same time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from tools.cluster.node import install


def test_installations_into_one_cluster_wait_for_each_other(tmp_path, monkeypatch):
    running, order = [], []

    def helm(cluster, chart, chart_values):
        running.append(chart)
        assert len(running) == 1, "helm refuses a second operation"
        time.sleep(0.01)
        order.append(chart)
        running.pop()

    monkeypatch.setattr(install, "_helm", helm)
    cluster = SimpleNamespace(directory=tmp_path, api=SimpleNamespace(apply_object=lambda *_: None))
    threads = [
        threading.Thread(target=install.install, args=(cluster, dict.fromkeys(install.IMAGES, "x"))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["rljob-crds", "rljob"] * 2
