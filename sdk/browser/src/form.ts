// Forms and functions that run once for each intent.
import { intent, isUnsettled, stateOf, type IntentOptions, type Outcome } from './index.js';

export interface FormOptions extends IntentOptions {
  /** The name of the intent. The `id` of the form by default, or its address. */
  name?: string;
  /** Gets each outcome. */
  onOutcome?: (outcome: Outcome) => void;
}

/**
 * Sends a form with `method="post"` as an intent, and ignores further submits until its outcome is there. `data-oncegate` of the form is
 * `pending` meanwhile, and the state of the outcome then: `unknown` also after a reload in the middle. Returns a function that stops it.
 */
export function submitOnce(form: HTMLFormElement, options?: FormOptions): () => void;
/** Wraps a function: a call while an earlier one has not ended returns the promise of that one. */
export function submitOnce<A extends unknown[], R>(run: (...args: A) => Promise<R>): (...args: A) => Promise<R>;
export function submitOnce(target: HTMLFormElement | ((...args: unknown[]) => Promise<unknown>), options: FormOptions = {}): unknown {
  let running: Promise<unknown> | undefined;
  const once = (run: () => Promise<unknown>): Promise<unknown> =>
    (running ??= run().finally(() => {
      running = undefined;
    }));
  if (typeof target === 'function') return (...args: unknown[]) => once(async () => target(...args));

  const form = target;
  // Not the properties: a field of the form may have their name.
  const attribute = (name: string, submitter?: HTMLElement | null): string => submitter?.getAttribute(`form${name}`) ?? form.getAttribute(name) ?? '';
  const nameOf = (url: string): string => options.name ?? (attribute('id') || url);
  const show = (state: string): void => {
    const isPending = state === 'pending';
    form.setAttribute('data-oncegate', state);
    form.setAttribute('aria-busy', String(isPending));
    // Not `disabled`: that takes the focus away, and Firefox keeps it over a reload.
    for (const button of form.querySelectorAll('[type=submit],[type=image],button:not([type])')) button.setAttribute('aria-disabled', String(isPending));
  };
  const submit = (event: SubmitEvent): void => {
    const { submitter } = event;
    if (event.defaultPrevented || attribute('method', submitter).toLowerCase() !== 'post') return;
    event.preventDefault();
    if (running !== undefined) return;
    const url = attribute('action', submitter) || location.href;
    const fields = new FormData(form, submitter);
    const content = attribute('enctype', submitter) === 'multipart/form-data' ? fields : new URLSearchParams(fields as unknown as URLSearchParams);
    show('pending');
    void once(async () => {
      const outcome = await intent(nameOf(url), url, content, options).send();
      show(stateOf(outcome));
      options.onOutcome?.(outcome);
    });
  };
  if (isUnsettled(nameOf(attribute('action') || location.href), options)) show('unknown');
  form.addEventListener('submit', submit);
  return () => {
    form.removeEventListener('submit', submit);
  };
}
