// A page in React, in strict mode: effects run twice.
import { StrictMode, useEffect, useState } from 'react';
import { createRoot, hydrateRoot } from 'react-dom/client';
import { useIdempotentMutation } from '../../dist/react.js';

function Pay({ atOnce, amount }) {
  const pay = useIdempotentMutation('pay', '/charges');
  const { mutate } = pay;
  useEffect(() => {
    if (atOnce) void mutate({ amount });
  }, [atOnce, amount, mutate]);
  return (
    <div id="pay" data-state={pay.state} data-replayed={String(pay.outcome?.isReplayed)}>
      <button disabled={pay.isPending} onClick={() => mutate({ amount })}>Pay</button>
      <button id="new" onClick={pay.reset}>New</button>
    </div>
  );
}

/** Another component of the same intent, such as a line at the top of the page. */
function Twin() {
  const { state } = useIdempotentMutation('pay', '/charges');
  return <p id="twin" data-state={state}>{state}</p>;
}

export function Page({ atOnce = false }) {
  const [isShown, setShown] = useState(true);
  return (
    <StrictMode>
      <button id="toggle" onClick={() => setShown(!isShown)}>Toggle</button>
      <Twin />
      {isShown && <Pay atOnce={atOnce} amount={5} />}
    </StrictMode>
  );
}

if (typeof document !== 'undefined') {
  const root = document.querySelector('#root');
  const page = <Page atOnce={location.search === '?at-once'} />;
  if (root.childElementCount > 0) hydrateRoot(root, page, { onRecoverableError: (error) => { window.recovered = String(error); } });
  else createRoot(root).render(page);
  document.body.dataset.ready = '';
}
