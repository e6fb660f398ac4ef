// A checkout, twice: as most pages have it, and with `useIdempotentMutation`. The buttons at the top break both in the same way.
import { useCallback, useEffect, useRef, useState } from 'react';
import { useIdempotentMutation } from 'oncegate-browser/react';

const TEAS = [
  { item: 'Sencha', note: 'green, from Uji', amount: 9 },
  { item: 'Oolong', note: 'roasted, from Nantou', amount: 14 },
  { item: 'Teapot', note: 'clay, for two', amount: 38 },
];
const FAULTS = [
  ['double-click', 'Double click', 'The button is pressed twice.'],
  ['lose-reply', 'Lose the reply', 'You are charged, and the reply is lost.'],
  ['crash', 'Crash the server', 'The service dies after the charge.'],
  ['reload', 'Reload in the middle', 'The page is loaded again while it waits.'],
];
const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });
const post = (path) => fetch(path, { method: 'POST' });

/** The ledger of the bank, asked again and again. */
function useLedger() {
  const [ledger, setLedger] = useState({ charges: [], orders: 0, requests: { plain: 0, safe: 0 }, protection: 'library' });
  const refresh = useCallback(async () => {
    try {
      setLedger(await (await fetch('/api/ledger')).json());
    } catch {
      // The shop is away: the page shows what it knew.
    }
  }, []);
  useEffect(() => {
    let timer;
    let isOver = false;
    const poll = async () => {
      await refresh();
      if (!isOver) timer = setTimeout(poll, 500);
    };
    void poll();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [refresh]);
  return [ledger, refresh];
}

/** A payment as most pages send it: an error is shown, and the customer presses the button again. */
function usePlainPayment() {
  const [state, setState] = useState('idle');
  const pay = useCallback(async (order) => {
    setState('pending');
    try {
      const response = await fetch('/plain/charges', { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(order) });
      await response.json();
      setState(response.ok ? 'done' : 'error');
      return response.ok;
    } catch {
      setState('error');
      return false;
    }
  }, []);
  return { state, pay, reset: useCallback(() => { setState('idle'); }, []) };
}

const PLAIN_TEXT = {
  idle: '',
  pending: 'Paying …',
  done: 'Thank you for your order.',
  error: 'Something went wrong. Please try again.',
};
function safeText({ state, outcome }) {
  switch (state) {
    case 'pending': return 'Paying …';
    case 'done': return outcome.isReplayed ? 'Paid. It was paid before, and you were not charged again.' : outcome.attempts > 1 ? `Paid. It took ${outcome.attempts} attempts, with one key.` : 'Paid.';
    case 'unknown':
      // The service says so itself, and says the same again until an operator has looked.
      if (outcome?.reason === 'unknown') return `We do not know if you have paid, and ask the bank. Do not pay in another way: you are not charged twice. Your number is ${outcome.key}.`;
      return 'We do not know if you have paid. Do not pay in another way. Try again: you are not charged twice.';
    case 'not-done': return 'Nothing was charged. Please try again.';
    case 'refused': return 'The payment was refused, and nothing was charged.';
    case 'failed': return `The payment failed, and trying again does not help. Ask us about ${outcome.key}.`;
    default: return '';
  }
}

function Lane({ lane, title, subtitle, text, state, charges, orders, requests, children }) {
  const own = charges.filter((charge) => charge.lane === lane).reverse();
  const total = own.reduce((sum, { amount }) => sum + amount, 0);
  const isWrong = own.length > orders;
  return (
    <section className={`lane ${lane}`} aria-labelledby={`${lane}-title`}>
      <header>
        <h2 id={`${lane}-title`}>{title}</h2>
        <p>{subtitle}</p>
      </header>
      <div className="pay">
        {children}
        <p className={`status ${state}`} role="status" data-lane={lane} data-state={state}>{text}</p>
      </div>
      <div className="ledger">
        <h3>
          What the bank charged
          <span className={`verdict ${orders === 0 && own.length === 0 ? '' : isWrong ? 'wrong' : 'right'}`} data-lane={lane} data-charges={own.length}>
            {own.length} {own.length === 1 ? 'charge' : 'charges'} for {orders} {orders === 1 ? 'order' : 'orders'}
          </span>
        </h3>
        <ol>
          {own.slice(0, 6).map((charge) => (
            <li key={charge.number}>
              <span className="number">No. {charge.number}</span>
              <span>{charge.item}</span>
              <span className="amount">€ {charge.amount}</span>
            </li>
          ))}
          {own.length === 0 && <li className="nothing">Nothing yet</li>}
          {own.length > 6 && <li className="nothing">and {own.length - 6} more</li>}
        </ol>
        <p className="total">
          <span>{requests} {requests === 1 ? 'request' : 'requests'} arrived</span>
          <strong>€ {total}</strong>
        </p>
      </div>
    </section>
  );
}

export function Shop() {
  const [ledger, refresh] = useLedger();
  const [tea, setTea] = useState(() => TEAS.find(({ item }) => item === sessionStorage.getItem('tea')) ?? TEAS[0]);
  const [story, setStory] = useState('');
  const [isBusy, setBusy] = useState(false);
  const isNew = useRef(sessionStorage.getItem('order') === null);
  const plain = usePlainPayment();
  const safe = useIdempotentMutation('checkout', '/safe/charges');
  const order = { item: tea.item, amount: tea.amount };
  const isOpen = safe.isPending || safe.state === 'unknown';

  /** Counts an order when its button is pressed for the first time. */
  const begin = async () => {
    if (!isNew.current) return;
    isNew.current = false;
    sessionStorage.setItem('order', 'begun');
    // Also a customer who is offline has an order.
    while (!(await post('/api/orders').catch(() => undefined))?.ok) await pause(500);
  };
  /** Another purchase, which may be of the same. */
  const next = () => {
    isNew.current = true;
    sessionStorage.removeItem('order');
    plain.reset();
    safe.reset();
    setStory('');
  };
  const choose = (chosen) => {
    setTea(chosen);
    sessionStorage.setItem('tea', chosen.item);
    next();
  };
  const payPlain = () => {
    void begin();
    return plain.pay(order);
  };
  const paySafe = () => {
    void begin();
    return safe.mutate(order);
  };
  /** A customer who is told that something went wrong presses the button again. */
  const payUntilDone = async () => {
    if (await payPlain()) return;
    setStory('The page without keys shows an error, and the customer presses Pay again.');
    await pause(900);
    await payPlain();
  };

  const run = async (fault) => {
    setBusy(true);
    next();
    await begin();
    setStory(FAULTS.find(([name]) => name === fault)[2]);
    if (fault === 'double-click') {
      await Promise.all([payPlain(), payPlain(), paySafe(), paySafe()]);
    } else {
      await post(`/api/faults/${fault === 'reload' ? 'slow' : fault}`);
      if (fault === 'reload') {
        sessionStorage.setItem('resume', 'yes');
        void payPlain();
        void paySafe();
        await pause(600);
        location.reload();
        return;
      }
      await Promise.all([payUntilDone(), paySafe()]);
    }
    await refresh();
    setBusy(false);
  };
  // After the reload, the customer presses both buttons again.
  const resume = async () => {
    setBusy(true);
    setStory('The page was loaded again. The customer does not know, and presses Pay again.');
    await pause(1500);
    await Promise.all([payPlain(), paySafe()]);
    await refresh();
    setBusy(false);
  };
  const resumeOnce = useRef(resume);
  useEffect(() => {
    if (sessionStorage.getItem('resume') === null) return;
    sessionStorage.removeItem('resume');
    void resumeOnce.current();
  }, []);
  const startOver = async () => {
    await post('/api/reset');
    next();
    await refresh();
  };

  const shared = { charges: ledger.charges, orders: ledger.orders };
  return (
    <main>
      <header className="top">
        <svg className="mark" viewBox="0 0 48 48" aria-hidden="true">
          <path d="M8 20h26v8a13 13 0 0 1-26 0z" fill="currentColor" />
          <path d="M34 23h3a5 5 0 0 1 0 10h-4M5 44h32M15 15c-3-3 3-5 0-9M23 15c-3-3 3-5 0-9" fill="none" stroke="currentColor" strokeWidth="3" strokeLinecap="round" />
        </svg>
        <div>
          <h1>The tea shop</h1>
          <p>One checkout, sent in two ways. Break it, and look at what the bank charged.</p>
        </div>
      </header>

      <fieldset className="teas">
        <legend>Your order</legend>
        {TEAS.map((each) => (
          <label key={each.item} className={each === tea ? 'chosen' : ''}>
            <input type="radio" name="tea" checked={each === tea} disabled={isBusy || isOpen} onChange={() => { choose(each); }} />
            <span className="name">{each.item}</span>
            <span className="note">{each.note}</span>
            <span className="amount">€ {each.amount}</span>
          </label>
        ))}
      </fieldset>

      <section className="faults" aria-labelledby="faults-title">
        <h2 id="faults-title">Buy it, and break it</h2>
        <div className="buttons">
          {FAULTS.map(([name, label]) => (
            <button key={name} type="button" disabled={isBusy || isOpen} data-fault={name} onClick={() => { void run(name); }}>{label}</button>
          ))}
        </div>
        <p className="story" role="status">{story || 'Each button is one order: the customer wants it once.'}</p>
      </section>

      <div className="lanes">
        <Lane lane="plain" title="Without keys" subtitle="fetch, an error message, and a customer who tries again" text={PLAIN_TEXT[plain.state]} state={plain.state} requests={ledger.requests.plain} {...shared}>
          <button type="button" className="buy" onClick={() => { void payPlain(); }}>Pay € {tea.amount}</button>
        </Lane>
        <Lane
          lane="safe"
          title="With Oncegate"
          subtitle={ledger.protection === 'sidecar' ? 'useIdempotentMutation, and the sidecar before the service' : 'useIdempotentMutation, and the library in the service'}
          text={safeText(safe)}
          state={safe.state}
          requests={ledger.requests.safe}
          {...shared}
        >
          <button type="button" className="buy" aria-disabled={safe.isPending} onClick={() => { void paySafe(); }}>{safe.state === 'unknown' ? 'Try again' : `Pay € ${tea.amount}`}</button>
        </Lane>
      </div>

      <footer>
        <button type="button" className="quiet" disabled={isBusy || safe.isPending} onClick={next}>{safe.state === 'unknown' ? 'I asked the shop: new order' : 'New order'}</button>
        <button type="button" className="quiet" disabled={isBusy || safe.isPending} onClick={() => { void startOver(); }}>Empty the ledger</button>
      </footer>
    </main>
  );
}
