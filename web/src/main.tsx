/** Entry point: take the token out of the address, choose the data source, render. */

import { render } from "preact";
import { copyOf, DATA_ID, readData } from "./api/copy-bytes";
import { FileSource } from "./api/file-source";
import { HubSource } from "./api/hub-source";
import { reportIn } from "./api/report-document";
import { App, ReportApp } from "./app";
import { keepLinksInside } from "./frame-links";
import { go, offered, route, takeToken } from "./route";
import { asFailure, firstQuestions } from "./run/open-run";
import { DamagedCopy } from "./screens/damaged-copy";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/layout.css";
import { startShortcuts } from "./ui/shortcuts";
import { startTheme } from "./ui/theme";

async function start(): Promise<void> {
  startTheme();
  startShortcuts();
  const place = document.getElementById("app");
  if (place === null) return;
  const data = document.getElementById(DATA_ID);
  if (data !== null) {
    await openCopy(data.textContent ?? "", place);
    return;
  }
  const source = new HubSource(new URL(".", location.href).href);
  offered.value = takeToken();
  await takeOffer(source);
  expectRun(source);
  render(<App source={source} />, place);
  // If a link with a token is pasted into the address bar of an open page: sign in and render again.
  offered.subscribe((token) => {
    if (token) void takeOffer(source).then(() => render(<App key={Date.now()} source={source} />, place));
  });
}

async function takeOffer(source: HubSource): Promise<void> {
  const token = offered.value;
  offered.value = "";
  if (token) await source.signIn(token).catch(() => false); // the screen shows the failure
}

/** Request the data for the first view early, while the screen is built. */
function expectRun(source: HubSource): void {
  const [name] = route.value.runs;
  if (route.value.screen !== "run" || name === undefined) return;
  for (const [path, params] of firstQuestions(name)) source.expect(path, params);
}

/** The data is in the file: a copy of a run, or a report on other files. */
async function openCopy(base64: string, place: HTMLElement): Promise<void> {
  keepLinksInside();
  try {
    const data = await readData(base64);
    const report = reportIn(data.json);
    if (report !== null) {
      render(<ReportApp report={report} />, place);
      return;
    }
    const source = new FileSource(copyOf(data));
    if (!["run", "incident"].includes(route.value.screen) || route.value.runs[0] !== source.copy.run) go({ screen: "run", runs: [source.copy.run] });
    render(<App source={source} />, place);
  } catch (error) {
    render(<DamagedCopy failure={asFailure(error)} />, place);
  }
}

void start();
