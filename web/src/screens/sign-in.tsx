/** Those who have the hub's token may look. The address stays as it is: after it one is where one wanted to be. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import type { Source } from "../api/source";
import { asFailure } from "../run/open-run";

interface SignInFormProps {
  source: Source;
  onDone: () => void;
  /** Whether the field takes the focus: where there is nothing else to do. */
  focus: boolean;
}

export function SignInForm({ source, onDone, focus }: SignInFormProps) {
  const field = useRef<HTMLInputElement>(null);
  const busy = useSignal(false);
  const trouble = useSignal("");
  useEffect(() => {
    if (focus) field.current?.focus();
  }, []);
  const submit = async (event: Event): Promise<void> => {
    event.preventDefault();
    const token = field.current?.value.trim() ?? "";
    if (token === "" || busy.value) return;
    busy.value = true;
    trouble.value = "";
    try {
      if (await source.signIn(token)) {
        if (field.current !== null) field.current.value = "";
        onDone();
      } else {
        trouble.value = "That is not this hub’s token. A hub that was started anew may have another.";
        field.current?.select();
      }
    } catch (error) {
      trouble.value = asFailure(error).message;
    }
    busy.value = false;
  };
  return (
    <form class="sign-in" onSubmit={(event) => void submit(event)}>
      {/* For those who keep their tokens in a password manager. */}
      <input type="text" autocomplete="username" value="stepscope" hidden readOnly />
      <label for="token">Token</label>
      <div class="sign-in-row">
        {/* Not kept in a signal: it stands in the field alone, and only until it is sent. */}
        <input id="token" ref={field} type="password" autocomplete="current-password" spellcheck={false} aria-describedby="token-trouble" aria-invalid={trouble.value !== ""} />
        <button type="submit" class="primary" disabled={busy.value}>
          {busy.value ? "…" : "Sign in"}
        </button>
      </div>
      <p id="token-trouble" class="sign-in-trouble" role="alert">
        {trouble.value}
      </p>
    </form>
  );
}

/** Where a token is to be found. */
export function WhereTheTokenIs() {
  return (
    <ul class="hints">
      <li>
        of <code>stepscope serve</code>: in the file that it names when it starts, usually <code>~/.config/stepscope/serve-PORT.token</code>
      </li>
      <li>
        of a run that goes on: in <code>hub.json</code> in the run’s folder, behind <code>token</code>
      </li>
      <li>
        one that was made for you with <code>stepscope token create</code>
      </li>
    </ul>
  );
}
