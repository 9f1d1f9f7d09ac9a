/** Below the verdict: exceptions with their tracebacks, attempts, notices. */

import type { OpenRun } from "../run/open-run";
import { useSummary } from "../run/summary";
import { duration } from "../ui/format";
import { attemptText, attemptsOf, errorText, errorsOf, followedText, toldFirst, tracebackTitle, type RankError } from "../words/endings";

const SHOWN = 4;

export function Aftermath({ run }: { run: OpenRun }) {
  const summary = useSummary(run)?.summary;
  if (summary === undefined) return null;
  const errors = errorsOf(summary["errors"]);
  const attempts = attemptsOf(summary["attempts"]);
  const notices = Array.isArray(summary["notices"]) ? summary["notices"].map(String) : [];
  const { own, followed } = toldFirst(errors);
  if (errors.length + attempts.length + notices.length === 0) return null;
  return (
    <div class="aftermath">
      {own.length > 0 && <h3>Errors</h3>}
      {own.slice(0, SHOWN).map((error, at) => (
        <Ended key={`${error.rank} ${error.pid} ${error.attempt}`} error={error} lead={at === 0 && run.findings.value?.findings[0]?.evidence["exception"] === error.type} />
      ))}
      {own.length > SHOWN && <p class="muted">and {own.length - SHOWN} more errors</p>}
      {followed.length > 0 && (
        <p class="muted small">{followedText(followed, own)}</p>
      )}
      {attempts.length > 0 && (
        <details class="fold">
          <summary>
            {attempts.length} attempts; all figures are from attempt {attempts.at(-1)?.attempt}
          </summary>
          <ol class="plain-list">
            {attempts.map((one) => (
              <li key={one.attempt}>
                {attemptText(one)}
                {one.pause_s === null ? "" : `; ${duration(one.pause_s * 1e9)} until the next one’s first step`}
              </li>
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

/** `lead`: the verdict above tells of this error, so its text is not repeated. */
function Ended({ error, lead }: { error: RankError; lead: boolean }) {
  return (
    <details class="fold error" open={lead}>
      <summary>{lead ? tracebackTitle(error) : errorText(error)}</summary>
      {error.short ? <Traceback text={error.short} /> : <p class="muted">No traceback.</p>}
      {error.short !== error.traceback && (
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
