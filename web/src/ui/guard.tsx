/** Around a screen: a fault of ours, or data that has another form than it should, is told; the page is never blank. */

import type { ComponentChildren } from "preact";
import { useErrorBoundary } from "preact/hooks";

export function Guard({ children }: { children: ComponentChildren }) {
  const [fault, again] = useErrorBoundary() as [unknown, () => void];
  if (fault === undefined) return <>{children}</>;
  return (
    <main class="trouble">
      <h1>The page made a mistake</h1>
      <p role="alert">What there is cannot be drawn: {fault instanceof Error ? fault.message : String(fault)}</p>
      <p>
        The same figures as text: <code>stepscope report RUN</code>.
      </p>
      <p>
        <button type="button" class="primary" onClick={again}>
          Try again
        </button>
      </p>
    </main>
  );
}
