"""The Prefect UI as a person sees it, in a headless Chromium: runs, graph, every artifact with its plots, every form."""

import os
import shutil

import pytest
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
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,2400"):
        options.add_argument(flag)
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def trained(served):
    """The run of a whole job in this process, recorded by the served Prefect."""
    write_market(served.home / "landing", series={"AAA": 160, "BBB": 140}, seed=9)
    with served.client() as client, pytest.MonkeyPatch.context() as patch:
        for name, value in served.environment.items():
            if name.startswith(("AWS_", "FORECASTLE_")):
                patch.setenv(name, value)
        state = pipeline(
            str(served.home / "landing"), None, None, TFTConfig(**TINY["retrain-tft"]), DQNConfig(**TINY["retrain-dqn"]),
            return_state=True,
        )  # fmt: skip
        assert state.is_completed(), state
        return client.read_flow_run(state.state_details.flow_run_id)


class Page:
    """A page of the UI, waited for."""

    def __init__(self, browser, served, path):
        self.browser = browser
        browser.get(f"http://127.0.0.1:{served.port}/{path}")

    def text(self):
        return self.browser.find_element(By.TAG_NAME, "body").text

    def shows(self, *words, seconds=30):
        wait_for(lambda: all(word in self.text() for word in words), seconds, lambda: f"{words} not in: {self.text()}")

    def plots(self):
        """Width and height in pixels of each image in an artifact, 0 for one that did not load."""
        script = "return [...document.querySelectorAll('img')].filter(i => i.src.startsWith('data:')).map(i => "
        return self.browser.execute_script(script + "[i.naturalWidth && i.clientWidth, i.naturalHeight && i.clientHeight])")

    def keep(self, name):
        """A screenshot in the folder FORECASTLE_SCREENSHOTS, when that is set: to look at."""
        if folder := os.environ.get("FORECASTLE_SCREENSHOTS"):
            self.browser.save_screenshot(f"{folder}/{name}.png")


def test_runs_and_the_graph_of_a_run_are_shown(browser, served, trained):
    page = Page(browser, served, "runs")
    page.shows("pipeline", "retrain-tft[", "retrain-dqn[", "Completed")
    page.keep("runs")
    page = Page(browser, served, f"runs/flow-run/{trained.id}")
    page.shows(trained.name, "Completed")
    wait_for(lambda: browser.find_elements(By.CSS_SELECTOR, ".flow-run-graph canvas, canvas"), 30, page.text)
    size = browser.find_element(By.TAG_NAME, "canvas").size
    assert size["width"] > 300
    assert size["height"] > 100
    page.keep("graph")


def test_every_artifact_is_shown_with_its_plots(browser, served, trained):
    with served.client() as client:
        artifacts = {a.key: a for a in client.read_artifacts(limit=200)}
    reports = {"tft-training-report": "tft", "dqn-training-report": "dqn"}
    others = {f"{family}-{kind}" for family in ("tft", "dqn") for kind in ("lineage", "progress", "versions")}
    assert set(artifacts) >= {*reports, *others, "validation"}
    for key, artifact in artifacts.items():
        page = Page(browser, served, f"artifacts/artifact/{artifact.id}")
        page.shows(key)
        if key in reports:
            planned = artifact.data.count("data:image/svg+xml;base64,")
            assert planned >= 2, key
            wait_for(lambda page=page, planned=planned: len(page.plots()) == planned, 30, page.text)
            assert all(width > 300 and height > 60 for width, height in page.plots()), page.plots()
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
                browser.find_element(By.XPATH, "//button[contains(., 'Add item')]").click()
                item = wait_for(
                    lambda: browser.find_elements(By.XPATH, "//*[normalize-space(text())='sources']/following::textarea"), 10
                )
                item[0].send_keys("/landing/2026")
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
