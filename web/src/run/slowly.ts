/** A throttled signal, for panels that need not redraw with every step of a fast run. */

import { useSignal, useSignalEffect, type ReadonlySignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

/** The current value, updated at most every `everyMs`; the last value is never missed. */
export function useSlowly<T>(source: ReadonlySignal<T>, everyMs: number): T {
  const shown = useSignal(source.peek());
  const timer = useRef<ReturnType<typeof setTimeout> | null>(null);
  const changedMs = useRef(-Infinity);
  useSignalEffect(() => {
    const value = source.value;
    if (value === shown.peek() || timer.current !== null) return;
    const change = (): void => {
      timer.current = null;
      changedMs.current = performance.now();
      shown.value = source.peek();
    };
    const wait = changedMs.current + everyMs - performance.now();
    if (wait <= 0) change();
    else timer.current = setTimeout(change, wait);
  });
  useEffect(
    () => () => {
      if (timer.current !== null) clearTimeout(timer.current);
    },
    [],
  );
  return shown.value;
}
