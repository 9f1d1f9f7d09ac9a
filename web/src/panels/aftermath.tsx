/** Below the verdict: whether to start a failed job again, exceptions with their tracebacks, attempts, notices. */

import type { OpenRun } from "../run/open-run";
import { useSummary } from "../run/summary";
import type { AdviceView, SummaryText } from "../api/text-documents";

const SHOWN = 4;

export function Aftermath({ run }: { run: OpenRun }) {
  const answer = useSummary(run);
  if (answer === null) return null;
  const { summary, text } = answer;
  const { own, followed } = text.errors;
  const { attempts } = text;
  const advice = text.advice ?? null;
  const notices = Array.isArray(summary["notices"]) ? summary["notices"].map(String) : [];
  if (own.length + attempts.length + notices.length === 0 && followed === "" && advice === null) return null;
  return (
    <div class="aftermath">
      {advice !== null && <RestartAdvice advice={advice} />}
      {own.length > 0 && <h3>Errors</h3>}
      {own.slice(0, SHOWN).map((error, at) => (
        <Ended key={at} error={error} lead={at === 0 && run.findings.value?.findings[0]?.evidence["exception"] === error.type} />
      ))}
      {own.length > SHOWN && <p class="muted">and {own.length - SHOWN} more errors</p>}
      {followed !== "" && <p class="muted small">{followed}</p>}
      {attempts.length > 0 && (
        <details class="fold">
          <summary>
            {attempts.length} attempts; all figures are from the last one
          </summary>
          <ol class="plain-list">
            {attempts.map((attempt) => (
              <li key={attempt}>{attempt}</li>
            ))}
          </ol>
        </details>
      )}
      {notices.length > 0 && (
        <details class="fold" open={notices.length <= 2}>
          <summary>{notices.length === 1 ? "1 notice" : `${notices.length} notices`}</summary>
          <ul class="plain-list">
            {notices.slice(0, 50).map((line) => (
              <li key={line}>{line}</li>
            ))}
          </ul>
        </details>
      )}
    </div>
  );
}

function RestartAdvice({ advice }: { advice: AdviceView }) {
  return (
    <>
      <h3>Start it again?</h3>
      <p>
        {advice.text} {advice.command && <span class="muted small">({advice.command})</span>}
      </p>
      {advice.evidence.length > 0 && (
        <details class="fold">
          <summary>Why</summary>
          <ul class="plain-list">
            {advice.evidence.map((line) => (
              <li key={line}>{line}</li>
            ))}
          </ul>
        </details>
      )}
    </>
  );
}

/** `lead`: the verdict above tells of this error, so its text is not repeated. */
function Ended({ error, lead }: { error: SummaryText["errors"]["own"][number]; lead: boolean }) {
  return (
    <details class="fold error" open={lead}>
      <summary>{lead ? error.title : error.text}</summary>
      {error.traceback_short ? <Traceback text={error.traceback_short} /> : <p class="muted">No traceback.</p>}
      {error.traceback_short !== error.traceback && (
        <details class="fold">
          <summary>All frames</summary>
          <Traceback text={error.traceback} />
        </details>
      )}
    </details>
  );
}

function Traceback({ text }: { text: string }) {
  return (
    <pre class="traceback" tabIndex={0}>
      {text}
    </pre>
  );
}
