/** The page of one incident: what is wrong, since when, what it costs, what to do, and everything recorded around it. */

import { useEffect, useState } from "preact/hooks";
import { LIST, encoded } from "../address";
import type { IncidentDocument } from "../api/incident-documents";
import { aborted, type Failure, type Source } from "../api/source";
import { Evidence } from "../panels/evidence";
import { Around, Changes, Earlier, Errors, Logs, Stacks, Timeline } from "../panels/incident-sections";
import { From, List, Statements } from "../panels/incident-statements";
import { PictureView } from "../panels/picture";
import { PriceView } from "../panels/price";
import { go, runLink } from "../route";
import { asFailure } from "../run/open-run";
import { copied } from "../ui/clipboard";
import { SeverityMark, severityWord } from "../ui/severity";
import { useShortcuts } from "../ui/shortcuts";
import { setTab } from "../ui/tab";
import { tell } from "../ui/toast";
import { OutOfDate } from "./out-of-date";
import { PageTools } from "./page-tools";
import { ScreenBar } from "./screen-bar";
import { TroubleScreen } from "./trouble";
import "./incident.css";

const AGAIN_MS = 10_000;
const HOUR_S = 3600;

export function IncidentScreen({ source, name, number }: { source: Source; name: string; number: number }) {
  const [found, setFound] = useState<IncidentDocument | null>(null);
  const [failure, setFailure] = useState<Failure | null>(null);
  const [turn, setTurn] = useState(0);
  useShortcuts("Incident", [
    { keys: "g r", words: "go to the run", act: () => go({ screen: "run", runs: [name], incident: null }) },
    { keys: "g l", words: "go to the list of runs", act: () => go(LIST) },
  ]);
  useEffect(() => {
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const later = (): void => void (timer = setTimeout(() => void (document.hidden ? later() : ask()), AGAIN_MS));
    const ask = async (): Promise<void> => {
      try {
        const document = await source.get<IncidentDocument>(`runs/${encoded(name)}/incidents/${number}`, {}, stop.signal);
        setFound(document);
        setFailure(null);
        if (!document.run.over) later();
      } catch (error) {
        if (aborted(error)) return;
        const failed = asFailure(error);
        setFailure(failed);
        if (!final(failed)) later();
      }
    };
    void ask();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [source, name, number, turn]);
  useEffect(() => setTab(`Incident ${number} of ${name}`, "none"), [name, number]);
  if (failure !== null && (found === null || final(failure))) return <TroubleScreen failure={failure} source={source} what={name} onAgain={() => setTurn(turn + 1)} />;
  return (
    <>
      <ScreenBar home={source.kind === "hub"} title={`Incident ${number}`}>
        <a href={runLink(name)}>
          Run <bdi>{found?.run.name ?? name}</bdi>
        </a>
        <span class="space" />
        {source.kind === "hub" && found !== null && <Actions source={source} run={name} found={found} onDone={() => setTurn(turn + 1)} />}
        <PageTools />
      </ScreenBar>
      <main id="main" class="grid incident" tabIndex={-1} aria-busy={found === null}>
        {failure !== null && <OutOfDate />}
        {found === null ? <p class="nothing">Reading the incident …</p> : <Sections found={found} name={name} />}
      </main>
    </>
  );
}

/** Asking again does not help. */
function final({ trouble }: Failure): boolean {
  return trouble === "missing" || trouble === "refused";
}

/** Acknowledge and silence, for readers who may change the run; the text as Markdown for everyone. */
function Actions({ source, run, found, onDone }: { source: Source; run: string; found: IncidentDocument; onDone: () => void }) {
  const { number, state, kind } = found.incident;
  const may = found.may ?? [];
  const change = async (path: string, body: unknown, words: string): Promise<void> => {
    try {
      await source.change("POST", `runs/${encoded(run)}/${path}`, body);
      tell(words);
      onDone();
    } catch (error) {
      tell(asFailure(error).message);
    }
  };
  const copy = async (): Promise<void> => {
    try {
      const { markdown } = await source.get<{ markdown: string }>(`runs/${encoded(run)}/incidents/${number}`, { form: "markdown" });
      tell((await copied(markdown)) ? "Copied as Markdown, for GitHub, Slack or mail." : "The browser does not allow copying here.");
    } catch (error) {
      tell(asFailure(error).message);
    }
  };
  return (
    <div class="incident-actions">
      {may.includes("acknowledge") && state === "open" && (
        <button type="button" class="primary" onClick={() => void change(`incidents/${number}/acknowledge`, {}, "Acknowledged. The incident shows it within seconds.")}>
          Acknowledge
        </button>
      )}
      {may.includes("silence") && state !== "resolved" && (
        <button type="button" title="No messages about this kind of incident in this run for an hour" onClick={() => void change("silences", { seconds: HOUR_S, kind }, "Silenced for an hour: no messages about this kind of incident in this run.")}>
          Silence for 1 h
        </button>
      )}
      <button type="button" onClick={() => void copy()}>
        Copy as Markdown
      </button>
    </div>
  );
}

function Sections({ found, name }: { found: IncidentDocument; name: string }) {
  return (
    <>
      <Lead found={found} />
      <Statements title="Onset" rows={found.onset?.statements} half />
      <Statements title="Impact" rows={found.impact?.statements} half />
      <Around found={found} />
      <Logs found={found} />
      <Errors found={found} />
      <Stacks found={found} />
      <Statements title="Captures" rows={found.captures?.statements} />
      <Changes found={found} name={name} />
      <Earlier found={found} name={name} />
      <Timeline found={found} />
      {found.shortened && <p class="muted">Some parts were shortened to limit the size of this page.</p>}
    </>
  );
}

function Lead({ found }: { found: IncidentDocument }) {
  const { incident, finding, count: of } = found;
  const facts = [`incident ${incident.number} of ${of}`, incident.kind_text, incident.state_text, `run: ${found.run.status_text}`];
  return (
    <section class={`card verdict ${incident.state === "resolved" ? "info" : incident.severity}`} aria-label="Incident">
      <div class="verdict-head">
        <SeverityMark look={incident.severity} large />
        <div>
          <h2>{incident.title}</h2>
          <p class="facts">
            <span class={`severity ${incident.severity}`}>{severityWord(incident.severity)}</span>
            {facts.map((fact) => (
              <span key={fact}>{fact}</span>
            ))}
            {incident.source && <From source={incident.source} />}
          </p>
        </div>
      </div>
      {found.notice && <p class="muted small">{found.notice}</p>}
      {finding !== undefined && (
        <div class="finding-body">
          {finding.price.length > 0 && <PriceView words={finding.price} left={finding.time_left} />}
          <div class={`finding-columns ${finding.charts.length === 0 ? "without-pictures" : ""}`}>
            {finding.advice.length > 0 && (
              <div>
                <h3>What to do</h3>
                <ol class="advice">
                  {finding.advice.map((line) => (
                    <li key={line.text}>
                      {line.text} <From source={line.source} />
                    </li>
                  ))}
                </ol>
              </div>
            )}
            {finding.charts.length > 0 && (
              <div class="pictures">
                {finding.charts.map((picture) => (
                  <PictureView key={picture.title} picture={picture} />
                ))}
              </div>
            )}
          </div>
          <details class="fold">
            <summary>Evidence</summary>
            <List rows={finding.statements.slice(1)} />
            {finding.confidence && <p class="muted">Confidence: {finding.confidence}.</p>}
            <Evidence rows={finding.evidence} />
            <p>
              <From source={finding.source} />
            </p>
          </details>
        </div>
      )}
    </section>
  );
}
