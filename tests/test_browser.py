"""The Prefect UI as a person sees it, in a headless Chromium: runs, graph, every artifact with its plots, every form."""

import io
import os
import shutil

import numpy as np
import pytest
from PIL import Image
from prefect.client.schemas.actions import WorkPoolUpdate
from selenium import webdriver
from selenium.webdriver.common.by import By
from served import wait_for
from synthetic import write_market
from test_serve import TINY

from flows.pipeline import pipeline
from models.dqn.config import DQNConfig
from models.tft.config import TFTConfig

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with its driver is installed")
DATASET = "s3://models/datasets/x/dataset.json"
TYPED = {"ingest": {}, "retrain-tft": {"dataset": DATASET}, "retrain-dqn": {"dataset": DATASET}, "pipeline": {}, "predict": {}}


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # The newer UI asks an outside host for its settings: tests talk to this machine alone
    inside = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,2400", inside):
        options.add_argument(flag)
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def trained(served):
    """The run of a whole job in this process, recorded by the served Prefect; the second of two, so that a challenger met a
    champion. With everything that has a plot: calibrated quantiles, an earlier cut, another seed."""
    plotted = {"promotion": "not_worse", "conformal": True, "rolling_cuts": 1, "extra_seeds": 1}
    with served.client() as client, pytest.MonkeyPatch.context() as patch:
        for name, value in served.environment.items():
            if name.startswith(("AWS_", "FORECASTLE_")):
                patch.setenv(name, value)
        for rows in (300, 420):
            write_market(served.home / "seen", series={"AAA": rows, "BBB": rows - 20}, seed=9)
            state = pipeline(
                str(served.home / "seen"), "s3://models/seen", None, TFTConfig(**TINY["retrain-tft"], **plotted),
                DQNConfig(**TINY["retrain-dqn"]), return_state=True,
            )  # fmt: skip
            assert state.is_completed(), state
        return client.read_flow_run(state.state_details.flow_run_id)


SLOW = [("v1", "light"), ("v2", "dark"), ("v2", "light")]
LOOKS = [("v1", "dark"), *(pytest.param(*look, marks=pytest.mark.slow) for look in SLOW)]
both_uis = pytest.mark.parametrize(("ui", "theme"), LOOKS)


class Page:
    """A page of one of Prefect's two UIs, waited for."""

    def __init__(self, browser, served, path, ui="v1", theme="dark"):
        self.browser, self.look = browser, f"{ui}-{theme}"
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get(f"http://127.0.0.1:{served.port}/{path if ui == 'v1' else f'v2/{path}'}")
        if ui == "v1" and browser.execute_script("return document.documentElement.className") != theme:
            browser.execute_script(f"localStorage.setItem('color-scheme', JSON.stringify('{theme}'))")
            browser.refresh()

    def text(self):
        return self.browser.find_element(By.TAG_NAME, "body").text

    def shows(self, *words, seconds=30):
        wait_for(lambda: all(word in self.text() for word in words), seconds, lambda: f"{words} not in: {self.text()}")

    def plots(self):
        """How many plots of an artifact are loaded and large enough to read."""
        script = "return [...document.querySelectorAll('img')].filter(i => i.src.startsWith('data:') && i.naturalWidth && "
        return self.browser.execute_script(script + "i.clientWidth > 300 && i.clientHeight > 60).length")

    def green(self):
        """Pixels with the green of completed runs in the graph, above the bar at its foot: it is drawn by WebGL, so nothing
        else can be asked."""
        [canvas] = self.browser.find_elements(By.TAG_NAME, "canvas") or [None]
        if canvas is None or not canvas.size["width"]:
            return 0
        drawn = np.asarray(Image.open(io.BytesIO(canvas.screenshot_as_png)).convert("RGB"), int)
        red, green, blue = drawn[: len(drawn) * 9 // 10].transpose(2, 0, 1)
        return int(((green > red + 30) & (green > blue + 15)).sum())

    def keep(self, name):
        """A screenshot in the folder FORECASTLE_SCREENSHOTS, when that is set: to look at."""
        if folder := os.environ.get("FORECASTLE_SCREENSHOTS"):
            self.browser.save_screenshot(f"{folder}/{name}-{self.look}.png")


@both_uis
def test_runs_and_the_graph_of_a_run_are_shown(browser, served, trained, ui, theme):
    page = Page(browser, served, "runs", ui, theme)
    page.shows("pipeline", "retrain-tft[", "retrain-dqn[", "Completed")
    page.keep("runs")
    page = Page(browser, served, f"runs/flow-run/{trained.id}", ui, theme)
    page.shows(trained.name, "Completed")
    wait_for(lambda: page.green() > 1000, 120, page.text)
    page.keep("graph")


@both_uis
def test_every_artifact_is_shown_with_its_plots(browser, served, trained, ui, theme):
    with served.client() as client:
        artifacts = {a.key: a for a in client.read_latest_artifacts()}
    kinds = ("training-report", "lineage", "progress", "versions")
    assert set(artifacts) >= {*(f"{family}-{kind}" for family in ("tft", "dqn") for kind in kinds), "validation", "tft-promotion"}
    for key, artifact in artifacts.items():
        page = Page(browser, served, f"artifacts/artifact/{artifact.latest_id}", ui, theme)
        page.shows(key)
        planned = str(artifact.data).count("data:image/svg+xml;base64,")
        assert planned >= {"tft-training-report": 14, "dqn-training-report": 2, "tft-promotion": 1}.get(key, 0), key
        wait_for(lambda page=page, planned=planned: page.plots() == planned, 30, page.text)
        assert len(str(artifact.data)) < 300_000
        page.keep(f"artifact-{key}")


@pytest.mark.parametrize("name", [*TYPED, "backfill"])
def test_the_form_of_every_deployment_can_be_filled_in_and_submitted(browser, served, name):
    with served.client() as client:
        deployment = client.read_deployment_by_name(f"{name}/{name}")
        pool = client.read_work_pool(deployment.work_pool_name)
        client.update_work_pool(pool.name, WorkPoolUpdate(is_paused=True))  # what the form starts must not run
        try:
            page = Page(browser, served, f"deployments/deployment/{deployment.id}/run")
            page.shows("Parameters", "Submit")
            described = {k: v["description"] for k, v in deployment.parameter_openapi_schema["properties"].items()}
            page.shows(*(text.split("`")[0].split("{")[0][:40].strip() for text in described.values()))
            for parameter, value in TYPED.get(name, {}).items():
                label = f"//*[normalize-space(text())='{parameter}']/following::textarea[1]"
                browser.find_element(By.XPATH, label).send_keys(value)
            if name == "backfill":
                fields = "//*[normalize-space(text())='sources']/following::textarea"
                others = len(browser.find_elements(By.XPATH, fields))  # of the parameters that come after
                browser.find_element(By.XPATH, "//button[contains(., 'Add item')]").click()
                wait_for(lambda: len(browser.find_elements(By.XPATH, fields)) > others, 30, page.text)
                browser.find_elements(By.XPATH, fields)[0].send_keys("/landing/2026")
            page.keep(f"form-{name}")
            before = {r.id for r in client.read_flow_runs(limit=200)}
            browser.find_element(By.XPATH, "//button[@type='submit']").click()

            def submitted():
                new = [r for r in client.read_flow_runs(limit=200) if r.id not in before and not r.auto_scheduled]
                return [r for r in new if r.deployment_id == deployment.id]

            made = wait_for(submitted, 30, page.text)[0]
            for parameter, value in {**deployment.parameters, **TYPED.get(name, {})}.items():
                assert made.parameters[parameter] == value
            if name == "backfill":
                assert made.parameters["sources"] == ["/landing/2026"]
            client.delete_flow_run(made.id)
        finally:
            client.update_work_pool(pool.name, WorkPoolUpdate(is_paused=False))
