/** A run from its hub over HTTP. URLs are relative, so that a proxy may serve the hub below any path. */

import { encoded } from "../address";
import type { FilePiece, Heat } from "./documents";
import { HEAT_TYPE, readHeat } from "./heat-bytes";
import { aborted, Failure, type Follower, type Params, type Source } from "./source";
import { follow } from "./stream";

/** The supported `schema` of a response (docs/api.md). */
const SCHEMA = 1;
const JSON_TYPE = "application/json";
const TROUBLES: Record<number, Failure["trouble"]> = { 400: "wrong", 401: "refused", 404: "missing", 429: "busy", 503: "busy" };

export class HubSource implements Source {
  readonly kind = "hub";
  private token = "";
  /**
   * Whether the token is sent as a header: only if the cookie is not kept, as in a frame of another site. A proxy such as
   * Jupyter's may take the header for its own.
   */
  private bearing = false;
  /** Early requests by URL, see `expect`. */
  private readonly early = new Map<string, Promise<Response>>();

  constructor(private readonly base: string) {}

  async get<T>(path: string, params: Params = {}, signal?: AbortSignal): Promise<T> {
    return this.document<T>(await this.ask(path, params, JSON_TYPE, signal));
  }

  async change<T>(method: "POST" | "DELETE", path: string, body?: unknown): Promise<T> {
    const address = this.address(path, {});
    const how = (): RequestInit => ({
      method,
      headers: { ...this.headers(JSON_TYPE), ...(body === undefined ? {} : { "Content-Type": JSON_TYPE }) },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    });
    let response: Response;
    try {
      response = await this.fetched(address, how);
    } catch {
      throw new Failure("unreachable", "The hub is not responding.");
    }
    if (!response.ok) throw await failed(response);
    return this.document<T>(response);
  }

  private async document<T>(response: Response): Promise<T> {
    let parsed: unknown;
    try {
      parsed = await response.json();
    } catch (error) {
      if (aborted(error)) throw error;
      throw foreign(response);
    }
    const schema = typeof parsed === "object" && parsed !== null && "schema" in parsed ? parsed.schema : null;
    if (schema === null) throw foreign(response);
    if (schema !== SCHEMA) {
      throw new Failure("version", `The hub uses API version ${String(schema)}, this page version ${SCHEMA}.`);
    }
    return parsed as T;
  }

  /** Request a document early; the first `get` for it receives this response or its failure. */
  expect(path: string, params: Params = {}): void {
    let address: string;
    try {
      address = this.address(path, params);
    } catch {
      return;
    }
    const answer = this.fetched(address, () => ({ headers: this.headers(JSON_TYPE) })).then(whole);
    answer.catch(() => undefined);
    this.early.set(address, answer);
  }

  async heat(run: string, params: Params, signal?: AbortSignal): Promise<Heat> {
    const response = await this.ask(`runs/${encoded(run)}/heat`, params, HEAT_TYPE, signal);
    return readHeat(await response.arrayBuffer(), response.headers.get("X-Stepscope-Unit"), response.headers.get("X-Stepscope-Known-From"));
  }

  async file(run: string, path: string, params: Params = {}, signal?: AbortSignal): Promise<FilePiece> {
    const place = path.split("/").map(encoded).join("/");
    const response = await this.ask(`runs/${encoded(run)}/files/${place}`, params, "*/*", signal);
    const data = new Uint8Array(await response.arrayBuffer());
    return {
      text: new TextDecoder().decode(data),
      data,
      offset: Number(response.headers.get("X-Stepscope-Offset") ?? 0),
      size: Number(response.headers.get("X-Stepscope-Size") ?? data.length),
    };
  }

  async report(run: string): Promise<Blob> {
    const response = await this.ask(`runs/${encoded(run)}/report.html`, {}, "text/html");
    return response.blob();
  }

  async blob(path: string): Promise<Blob> {
    return (await this.ask(path, {}, "*/*")).blob();
  }

  follow(run: string, follower: Follower): () => void {
    const address = this.address(`runs/${encoded(run)}/stream`, {});
    return follow(
      (headers, signal) => this.fetched(address, () => ({ headers: { ...this.headers("text/event-stream"), ...headers }, signal, cache: "no-store" })),
      follower,
    );
  }

  async signIn(token: string): Promise<boolean> {
    let response: Response;
    try {
      response = await fetch(this.address("session", {}), {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ token }),
      });
    } catch {
      throw new Failure("unreachable", "The hub is not responding.");
    }
    if (response.status === 401) return false;
    if (!response.ok) throw await failed(response);
    await response.arrayBuffer(); // an unread response keeps its connection busy
    this.early.clear();
    this.token = token;
    return true;
  }

  private async ask(path: string, params: Params, accept: string, signal?: AbortSignal): Promise<Response> {
    const address = this.address(path, params);
    const early = this.early.get(address);
    this.early.delete(address);
    let response: Response;
    try {
      response = await (early ?? this.fetched(address, () => ({ headers: this.headers(accept), signal: signal ?? null })));
    } catch (error) {
      if (aborted(error)) throw error;
      throw new Failure("unreachable", "The hub is not responding.");
    }
    if (response.ok) return response;
    this.early.clear(); // a refused request may succeed next time
    throw await failed(response);
  }

  /** Send the cookie; if it turns out not to be kept, send the token. */
  private async fetched(address: string, how: () => RequestInit): Promise<Response> {
    const bore = this.bearing; // several requests may notice at once
    const response = await fetch(address, how());
    if (response.status !== 401 || this.token === "" || bore) return response;
    this.bearing = true;
    return fetch(address, how());
  }

  private headers(accept: string): Record<string, string> {
    return this.bearing ? { Accept: accept, Authorization: `Bearer ${this.token}` } : { Accept: accept };
  }

  private address(path: string, params: Params): string {
    // A browser would resolve such a path to another resource; no run or file has such a name.
    if (path.split("/").some((word) => word === "." || word === "..")) throw new Failure("missing", "Not found.");
    const url = new URL(`api/v1/${path}`, this.base);
    for (const [name, value] of Object.entries(params)) {
      if (value !== undefined) url.searchParams.set(name, String(value));
    }
    return url.href;
  }
}

/** Read the body: an unread response keeps its connection busy. */
async function whole(response: Response): Promise<Response> {
  const { status, headers } = response;
  return new Response(await response.arrayBuffer(), { status, headers });
}

/** The hub's error message, or a note that the response is not from a hub. */
async function failed(response: Response): Promise<Failure> {
  try {
    const parsed = (await response.json()) as { error?: unknown };
    if (typeof parsed.error === "string") return new Failure(TROUBLES[response.status] ?? "fault", parsed.error);
  } catch {
    // Such as a proxy's error page.
  }
  return foreign(response);
}

function foreign(response: Response): Failure {
  const what = response.headers.get("Content-Type")?.split(";")[0] ?? "nothing";
  return new Failure("foreign", `The response (${response.status}, ${what}) is not from a Stepscope hub.`);
}
