/** Shown if the data in a report.html cannot be used: what is wrong, and what to do. */

import type { Failure } from "../api/source";

export function DamagedCopy({ failure }: { failure: Failure }) {
  return (
    <main class="trouble">
      <h1>This copy of a run cannot be opened</h1>
      <p role="alert">{failure.message}</p>
      <p>
        Create a new copy where the run is stored: <code>stepscope report RUN --html FILE</code>. Send it as a zip file so that mail servers do not alter it.
      </p>
    </main>
  );
}
