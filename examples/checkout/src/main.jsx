import { StrictMode } from 'react';
import { createRoot } from 'react-dom/client';
import { Shop } from './shop.jsx';
import './style.css';

createRoot(document.querySelector('#root')).render(
  <StrictMode>
    <Shop />
  </StrictMode>,
);
