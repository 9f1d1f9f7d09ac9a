/** Error boundary around a screen: shows bugs and malformed data instead of a blank page. */

import type { ComponentChildren } from "preact";
import { useErrorBoundary } from "preact/hooks";

export function Guard({ children }: { children: ComponentChildren }) {
  const [fault, again] = useErrorBoundary() as [unknown, () => void];
  if (fault === undefined) return <>{children}</>;
  return (
    <main class="trouble">
      <h1>Internal error in the page</h1>
      <p role="alert">The data cannot be displayed: {fault instanceof Error ? fault.message : String(fault)}</p>
      <p>
        For the same figures as text, run <code>stepscope report RUN</code>.
      </p>
      <p>
        <button type="button" class="primary" onClick={again}>
          Try again
        </button>
      </p>
    </main>
  );
}
