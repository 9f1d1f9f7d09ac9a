/** A request that is repeated when its answer may have changed, at a limited rate. */

import { aborted, Failure } from "../api/source";

export interface Answer<T> {
  value: T | null;
  failure: Failure | null;
}

export class RepeatedRequest<T> {
  question: (stop: AbortSignal) => Promise<T> | null = () => null;
  /** Whether the request was made after the run ended, so that its answer is final. */
  finalRequested = false;
  private readonly stop = new AbortController();
  private timer: ReturnType<typeof setTimeout> | null = null;
  private requestedMs = -Infinity;
  private busy = false;
  private repeat = false;
  private hurry = false;

  constructor(
    private readonly answer: { value: Answer<T> },
    private readonly everyMs: number,
  ) {}

  due(now = false): void {
    if (this.stop.signal.aborted) return;
    if (this.busy) {
      this.repeat = true;
      this.hurry ||= now;
      return;
    }
    if (this.timer !== null && !now) return;
    if (this.timer !== null) clearTimeout(this.timer);
    const wait = now ? 0 : Math.max(0, this.requestedMs + this.everyMs - performance.now());
    this.timer = setTimeout(() => {
      this.timer = null;
      void this.ask();
    }, wait);
  }

  close(): void {
    this.stop.abort();
    if (this.timer !== null) clearTimeout(this.timer);
  }

  private async ask(): Promise<void> {
    const question = this.question(this.stop.signal);
    if (question === null) return;
    this.busy = true;
    this.repeat = this.hurry = false;
    this.requestedMs = performance.now();
    try {
      const value = await question;
      if (!this.stop.signal.aborted) this.answer.value = { value, failure: null };
    } catch (error) {
      // Keep the previous answer on the screen.
      if (!aborted(error) && !this.stop.signal.aborted) this.answer.value = { value: this.answer.value.value, failure: asFailure(error) };
    }
    this.busy = false;
    if (this.repeat) this.due(this.hurry);
  }
}

export function asFailure(error: unknown): Failure {
  return error instanceof Failure ? error : new Failure("fault", error instanceof Error ? error.message : String(error));
}
