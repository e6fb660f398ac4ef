// Responses of the middleware itself. The conditions are shared data; `crates/http/vectors/conditions.json` has them.
import { STATUS_CODES } from 'node:http';
import { contract } from './contract.js';
import type { Settings } from './settings.js';
import type { StoredField } from './response.js';

export type ConditionName = (typeof contract.conditions)[number]['name'];

export interface Condition {
  name: ConditionName;
  status: number;
  retry: string;
  title: string;
  detail: string;
}

const CONDITIONS: ReadonlyMap<string, Condition> = new Map(contract.conditions.map((condition) => [condition.name, condition]));

export function conditionOf(name: ConditionName): Condition {
  const condition = CONDITIONS.get(name);
  if (condition === undefined) throw new Error(`no condition ${name}`);
  return condition;
}

/** A response that is ready to be sent. Values of fields are bytes as `latin1` texts. */
export interface WireResponse {
  status: number;
  headers: StoredField[];
  body: Buffer;
}

/** The reason why the middleware responds instead of the handler. */
export interface Refusal {
  condition: ConditionName;
  detail?: string;
  retryAfter?: number;
  status?: number;
}

/** After these, no earlier request of the same content has taken effect. */
const REJECTIONS = new Set<ConditionName>([
  'key-missing', 'key-invalid', 'key-expired', 'key-unsupported', 'key-reused', 'request-too-large', 'request-malformed',
  'request-head-too-large', 'request-unsupported',
]);

/** The name of a header field as people write it, `Idempotency-Key`. */
function shown(name: string): string {
  return name.replace(/(^|-)([a-z])/g, (found) => found.toUpperCase());
}

/** A text with names in braces, which are replaced. A name that has no value is an error of the profile. */
function render(template: string, value: (name: string) => string | undefined): string | undefined {
  let isComplete = true;
  const text = template.replace(/\{([A-Za-z0-9\-_:]+)\}/g, (_, name: string) => {
    const found = value(name);
    if (found === undefined) isComplete = false;
    return found ?? '';
  });
  return isComplete ? text : undefined;
}

/** Fields that a profile adds. `{response:NAME}` is a field of the same response. */
export function addedFields(
  fields: Readonly<Record<string, string>>,
  response: readonly StoredField[],
  isRetryable: boolean,
): StoredField[] {
  const added: StoredField[] = [];
  for (const [name, template] of Object.entries(fields)) {
    if (template === '') continue;
    const value = render(template, (part) => {
      if (part === 'retryable') return String(isRetryable);
      const field = /^response:(.*)$/.exec(part)?.[1]?.toLowerCase();
      return response.find(([own]) => own === field)?.[1];
    });
    if (value !== undefined) added.push([name.toLowerCase(), value]);
  }
  return added;
}

/** Fields with some of them replaced. */
export function withFields(fields: readonly StoredField[], replacements: readonly StoredField[]): StoredField[] {
  const names = new Set(replacements.map(([name]) => name));
  return [...fields.filter(([name]) => !names.has(name)), ...replacements];
}

export function refusalResponse(settings: Settings, refusal: Refusal, record: Buffer | undefined): WireResponse {
  const condition = conditionOf(refusal.condition);
  const { profile } = settings;
  const status = refusal.status ?? profile.status(condition.name) ?? condition.status;
  const places = settings.keyHeaders.map(shown);
  const detail =
    refusal.detail === undefined
      ? condition.detail.replace('{place}', places.map((name) => `the header field ${name}`).join(' or '))
      : condition.name === 'key-invalid'
        ? `${places.join(' or ')}: ${refusal.detail}.`
        : refusal.detail;
  const json = (text: string) => JSON.stringify(text).slice(1, -1);
  const parts: Readonly<Record<string, string>> = {
    type: json(settings.problemBase + condition.name),
    title: json(condition.title),
    status: String(status),
    detail: json(detail),
    retry: json(condition.retry),
    slug: json(condition.name),
    code: json(profile.words(condition.name, status, 'code') ?? condition.name.replaceAll('-', '_')),
    kind: json(profile.words(condition.name, status, 'kind') ?? 'api_error'),
    reason: json(STATUS_CODES[status] ?? 'Error'),
    instance: record === undefined ? '' : `,"instance":"urn:oncegate:record:${record.toString('hex')}"`,
  };
  const body = Buffer.from(render(profile.body, (name) => parts[name]) ?? '');
  const isRetryable = condition.retry === 'same-key';
  let headers: StoredField[] = [
    ['content-type', profile.mediaType],
    ['content-language', 'en'],
    ['cache-control', 'no-store'],
  ];
  if (settings.documentation !== undefined) headers.push(['link', `<${settings.documentation}>; rel="describedby"`]);
  if (status === 401) headers.push(['www-authenticate', 'Bearer']);
  if (refusal.retryAfter !== undefined) headers.push(['retry-after', String(refusal.retryAfter)]);
  headers = withFields(headers, addedFields(profile.headers.refusal, [], isRetryable));
  if (REJECTIONS.has(condition.name)) headers = withFields(headers, addedFields(profile.headers.rejection, [], isRetryable));
  headers.push(['idempotency-status', `refused; problem=${condition.name}; retry=${condition.retry}`]);
  return { status, headers, body };
}
