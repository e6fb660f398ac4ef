// A hook for React 18 and later.
import { useCallback, useEffect, useRef, useState, useSyncExternalStore } from 'react';
import { forget, intent, isUnsettled, sendingOf, stateOf, type IntentOptions, type Outcome, type OutcomeState } from './index.js';

export interface IdempotentMutation<T> {
  /** `idle`, `pending`, or the state of the outcome. `unknown` also after a reload in the middle, before anything was sent again. */
  state: 'idle' | 'pending' | OutcomeState;
  isPending: boolean;
  /** The last outcome. */
  outcome: Outcome | undefined;
  /** Sends the content. The same content goes under the same key until its outcome is definite. */
  mutate: (content: T, signal?: AbortSignal) => Promise<Outcome>;
  /** Forgets the intent: the next `mutate` has a new key. For a new purchase, or if a person found out what became of this one. */
  reset: () => void;
}

type Watcher = (sending: Promise<Outcome> | undefined) => void;

/** The components of each name, which all show the same. */
const watchers = new Map<string, Set<Watcher>>();

const tell = (name: string, sending: Promise<Outcome> | undefined): void => {
  watchers.get(name)?.forEach((watcher) => { watcher(sending); });
};

const never = (): (() => void) => () => undefined;

/**
 * A mutation that takes effect once. A component that goes away does not stop it, and one that comes back continues to show it. Intents of
 * the same name are the same for all components.
 */
export function useIdempotentMutation<T>(name: string, url: string | URL, options: IntentOptions = {}): IdempotentMutation<T> {
  const [shown, setShown] = useState<{ name: string; isPending: boolean; outcome?: Outcome }>();
  const latest = useRef({ url, options });
  useEffect(() => {
    latest.current = { url, options };
  });
  const mounted = useRef<string>(undefined);
  const follow = useCallback(
    (sending: Promise<Outcome>): void => {
      setShown({ name, isPending: true });
      sending.then(
        (outcome) => {
          // A later outcome, of another name, is not overwritten.
          if (mounted.current === name && sendingOf(name) === undefined) setShown({ name, isPending: false, outcome });
        },
        () => {
          setShown(undefined);
        },
      );
    },
    [name],
  );
  useEffect(() => {
    mounted.current = name;
    const watcher: Watcher = (sending) => {
      if (sending === undefined) setShown(undefined);
      else follow(sending);
    };
    const all = watchers.get(name) ?? new Set();
    watchers.set(name, all.add(watcher));
    const sending = sendingOf(name);
    if (sending !== undefined) follow(sending);
    return () => {
      mounted.current = undefined;
      all.delete(watcher);
      if (all.size === 0 && watchers.get(name) === all) watchers.delete(name);
    };
  }, [name, follow]);
  const mutate = useCallback(
    (content: T, signal?: AbortSignal): Promise<Outcome> => {
      const sending = intent(name, latest.current.url, content, latest.current.options).send(signal);
      // Another content while this is being sent: what is shown stays with what is being sent.
      tell(name, sendingOf(name) ?? sending);
      return sending;
    },
    [name, follow],
  );
  const reset = useCallback((): void => {
    forget(name, latest.current.options);
    tell(name, undefined);
  }, [name]);
  // Servers know of no intent, and the first render in a browser has to be the same.
  const wasLeft = useSyncExternalStore(never, () => isUnsettled(name, options), () => false);
  const { isPending = false, outcome } = shown?.name === name ? shown : {};
  return { state: isPending ? 'pending' : outcome !== undefined ? stateOf(outcome) : wasLeft ? 'unknown' : 'idle', isPending, outcome, mutate, reset };
}
